"""`pdserve operator [--namespace NS | --all-namespaces]`: reconciles PDServices in a Kubernetes cluster."""

from __future__ import annotations

from pdserve.operator.main import main

__all__ = ["main"]
