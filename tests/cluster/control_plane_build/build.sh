#!/usr/bin/env bash
# Builds the control plane that the cluster tests run on, from Debian's own source and Go packages alone, into the cache
# folder: minutes on two cores, 2.5 GB of scratch space. Installs nothing; needs apt, dpkg, patch and a C-less Go build.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
target=${PDS_HOME:-$HOME/.cache/pdserve}/kube
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$target" "$work"/{lists/partial,archives/partial,packages,root,src}

# Debian's sources beside its binaries, in package lists of our own.
sed 's/^Types: deb$/Types: deb deb-src/' /etc/apt/sources.list.d/debian.sources > "$work/debian.sources"
apt=(apt-get -qq -o Dir::Etc::sourcelist="$work/debian.sources" -o Dir::Etc::sourceparts=/dev/null
     -o Dir::State::Lists="$work/lists" -o Dir::Cache="$work/archives" -o APT::Sandbox::User=root)
echo "==> fetching sources"
"${apt[@]}" update
packages=(golang-1.19-go golang-1.19-src golang-github-modern-go-reflect2-dev etcd-server)
(cd "$work/packages" && "${apt[@]}" source --download-only kubernetes && "${apt[@]}" download "${packages[@]}")
for package in "${packages[@]}"; do dpkg-deb -x "$work/packages/${package}"_*.deb "$work/root"; done

# The layout that Kubernetes of that age builds in: GOPATH, no modules.
tree=$work/src/k8s.io/kubernetes
mkdir -p "$tree"
tar xzf "$work"/packages/kubernetes_*.orig.tar.gz -C "$tree" --strip-components=1
cd "$tree"
tar xJf "$work"/packages/kubernetes_*.debian.tar.xz
while read -r patch; do patch -p1 -s < "debian/patches/$patch"; done < debian/patches/series
# The vendored reflect2 breaks under newer Go; Debian's package does not.
rm -rf vendor/github.com/modern-go/reflect2
cp -r "$work/root/usr/share/gocode/src/github.com/modern-go/reflect2" vendor/github.com/modern-go/reflect2
mkdir cmd/kubeall && cp "$here/main.go" cmd/kubeall/

export GOROOT=$work/root/usr/lib/go-1.19 GOPATH=$work GO111MODULE=off GOPROXY=off GOFLAGS= CGO_ENABLED=0
export GOCACHE=$work/cache PATH=$work/root/usr/lib/go-1.19/bin:$PATH

# OpenAPI definitions are generated, not checked in.
echo "==> generating OpenAPI definitions"
go build -o "$work/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
mapfile -t tagged < <(grep -rl --include='*.go' '+k8s:openapi-gen=' cmd pkg plugin vendor/k8s.io/ \
    | grep -vE '_test\.go$|/testdata/|vendor/k8s.io/(code-generator|sample-|gengo)' | xargs -n1 dirname | LC_ALL=C sort -u)
generate() { # target package, pattern of source packages
    local inputs
    inputs=$(printf '%s\n' "${tagged[@]}" | grep -E "$2" | sed 's#^#k8s.io/kubernetes/#' | paste -sd,)
    "$work/openapi-gen" -i "$inputs" -p "k8s.io/kubernetes/$1" -O zz_generated.openapi \
        -h vendor/k8s.io/code-generator/hack/boilerplate.go.txt -r /dev/null
}
meta='^vendor/k8s.io/apimachinery/pkg/(apis/meta/v1|runtime|version)$'
generate pkg/generated/openapi '^(cmd|pkg|plugin|vendor/k8s.io/)'
generate vendor/k8s.io/kube-aggregator/pkg/generated/openapi "$meta|^vendor/k8s.io/kube-aggregator/"
generate vendor/k8s.io/apiextensions-apiserver/pkg/generated/openapi \
    "$meta|^vendor/k8s.io/apiextensions|^vendor/k8s.io/api/autoscaling/v1\$"

echo "==> building (minutes)"
flags="-s -w"
for where in vendor/k8s.io/component-base vendor/k8s.io/client-go/pkg; do
    for field in gitVersion=v1.20.2 gitMajor=1 gitMinor=20 gitTreeState=clean; do
        flags+=" -X k8s.io/kubernetes/$where/version.$field"
    done
done
go build -tags providerless -trimpath -ldflags "$flags" -o "$target/kubeall" ./cmd/kubeall
cp "$work/root/usr/bin/etcd" "$target/etcd"
echo "==> $target/kubeall, $target/etcd"
