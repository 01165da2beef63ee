# SPDX-License-Identifier: Apache-2.0
"""Which vLLM this package was tested with, by version and by the text of what it builds on.

`python -m gb10_vllm.qualification [FOLDER]` prints the versions and what has changed in the installed vLLM (or in an unpacked one), and with
`--write` takes that vLLM into the table. Nothing of vLLM is imported, so it takes no GPU and a tenth of a second, in every process.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import metadata, util
from pathlib import Path

from gb10_vllm.errors import OverlayError

TABLE = Path(__file__).with_name("qualified.json")

SYMBOLS = (
    "plugins:load_plugins_by_group",
    "plugins:load_general_plugins",
    "transformers_utils.config:LazyConfigDict",
    "transformers_utils.configs.deepseek_v41:DeepseekV41Config",
    "config.vllm:VllmConfig._get_quantization_config",
    "model_executor.custom_op:PluggableLayer",
    "model_executor.layers.linear:LinearBase.__init__",
    "model_executor.layers.linear:ReplicatedLinear.__init__",
    "model_executor.layers.linear:ColumnParallelLinear.__init__",
    "model_executor.layers.linear:ColumnParallelLinear.forward",
    "model_executor.layers.linear:MergedColumnParallelLinear.__init__",
    "model_executor.layers.linear:QKVParallelLinear.__init__",
    "model_executor.layers.linear:RowParallelLinear.__init__",
    "model_executor.layers.linear:RowParallelLinear.forward",
    "model_executor.layers.vocab_parallel_embedding:VocabParallelEmbedding.__init__",
    "model_executor.layers.vocab_parallel_embedding:ParallelLMHead.__init__",
    "model_executor.layers.fused_moe.fused_moe_method_base:FusedMoEMethodBase",
    "model_executor.layers.fused_moe.routed_experts:RoutedExperts.__init__",
    "model_executor.layers.fused_moe.routed_experts:RoutedExperts.build_expert_params_mapping",
    "model_executor.layers.quantization:register_quantization_config",
    "model_executor.layers.quantization.base_config:QuantizationConfig",
    "model_executor.layers.quantization.base_config:resolve_quant_method",
    "model_executor.layers.sparse_attn_indexer:PrefillRowShard",
    "model_executor.layers.sparse_attn_indexer:SparseAttnIndexer",
    "model_executor.layers.sparse_attn_indexer:sparse_attn_indexer",
    "model_executor.model_loader.weight_utils:load_attention_sink",
    "model_executor.model_loader.weight_utils:filter_safetensors_files_by_weight_name",
    "models.deepseek_v4.nvidia.model:DeepseekV4MLP.__init__",
    "models.deepseek_v4.nvidia.model:DeepseekV4MoE._init_fused_moe_experts",
    "models.deepseek_v4.nvidia.ops.o_proj:deep_gemm_fp8_o_proj",
    "models.deepseek_v41.attention:DeepseekV4Attention.__init__",
    "models.deepseek_v41.attention:DeepseekV4Attention._run_parallel_input_projections",
    "models.deepseek_v41.attention:DeepseekV4Indexer.__init__",
    "models.deepseek_v41.common.engram:EngramLayout",
    "models.deepseek_v41.common.engram:ParallelEngramEmbedding",
    "models.deepseek_v41.common.engram:Engram",
    "models.deepseek_v41.compressor:DeepseekCompressor.__init__",
    "models.deepseek_v41.nvidia.dspark:DSparkDeepseekV4ForCausalLM",
    "models.deepseek_v41.nvidia.flashinfer_sparse:DeepseekV4FlashInferSM120Attention._o_proj",
    "models.deepseek_v41.nvidia.model:DeepseekV4DecoderLayer.__init__",
    "models.deepseek_v41.nvidia.model:DeepseekV4Model.__init__",
    "models.deepseek_v41.nvidia.model:DeepseekV4Model.load_weights",
    "models.deepseek_v41.nvidia.model:DeepseekV4Model._pad_shared_expert_weight",
    "models.deepseek_v41.nvidia.model:_make_deepseek_v4_weights_mapper",
    "models.deepseek_v41.nvidia.model:DeepseekV41LLMForCausalLM.__init__",
    "models.deepseek_v41.nvidia.model_state:DeepseekV41ModelState.prepare_inputs",
    "models.deepseek_v41.nvidia.ops.o_proj:dsv41_o_proj",
    "models.deepseek_v41.nvidia.vl_model:_make_deepseek_v4_vl_weights_mapper",
    "models.deepseek_v41.nvidia.vl_model:DeepseekV41ForCausalLM.__init__",
    "models.deepseek_v41.nvidia.vl_model:DeepseekV41ForCausalLM.load_weights",
    "models.deepseek_v41.quant_config:DeepseekV4FP8Config",
    "v1.attention.backends.mla.indexer:DeepseekV32IndexerMetadataBuilder.__init__",
    "v1.attention.backends.mla.indexer:DeepseekV32IndexerMetadataBuilder.build",
    "v1.attention.backends.mla.indexer:DeepseekV32IndexerPrefillChunkMetadata",
    "v1.attention.backends.mla.indexer:balanced_prefill_row_shard",
    "v1.attention.backends.mla.indexer:get_max_prefill_buffer_size",
)
"""What is subclassed, rebound, wrapped or relied on: module:qualified name."""


class Source:
    """The definitions of a vLLM that lies in a folder, by their text."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cache  # noqa: B019  # pylint: disable=method-cache-max-size-none
    def _module(self, name: str) -> tuple[list[str], dict[str, ast.AST]]:
        path = self.folder.joinpath(*name.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if not path.is_file():
            return [], {}
        text = path.read_text()
        found: dict[str, ast.AST] = {}

        def walk(body: Iterable[ast.stmt], outer: str) -> None:
            for node in body:
                if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    found[f"{outer}{node.name}"] = node
                    if isinstance(node, ast.ClassDef):
                        walk(node.body, f"{outer}{node.name}.")

        walk(ast.parse(text).body, "")
        return text.splitlines(), found

    def fingerprint(self, symbol: str) -> str:
        """16 hex digits of the SHA-256 of a definition with its decorators; empty for one that is not there."""
        module, _colon, name = symbol.partition(":")
        lines, found = self._module(module)
        node = found.get(name)
        if node is None:
            return ""
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])  # type: ignore[attr-defined]
        return hashlib.sha256("\n".join(lines[first - 1 : node.end_lineno]).encode()).hexdigest()[:16]  # type: ignore[attr-defined]


def fingerprints(folder: Path) -> dict[str, str]:
    """All of SYMBOLS in the vLLM of a folder."""
    source = Source(folder)
    return {symbol: source.fingerprint(symbol) for symbol in SYMBOLS}


def table() -> dict[str, dict[str, str]]:
    """Version to fingerprints."""
    return json.loads(TABLE.read_text())


def installed() -> tuple[str, Path]:
    """Version, without a build's suffix, and folder of the vLLM that would be imported."""
    spec = util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise OverlayError("no vLLM is installed beside gb10_vllm: install one of its qualified versions")
    return metadata.version("vllm").partition("+")[0], Path(next(iter(spec.submodule_search_locations)))


def changed(now: Mapping[str, str], qualified: Mapping[str, str]) -> list[str]:
    """Symbols of other text, or that are not there."""
    return [symbol for symbol in SYMBOLS if now.get(symbol) != qualified.get(symbol)]


def check(version: str, folder: Path, qualified: Mapping[str, Mapping[str, str]]) -> None:
    """Raises OverlayError for a vLLM that this package was not tested with."""
    if version not in qualified:
        raise OverlayError(
            f"vLLM {version} is not qualified for gb10_vllm ({', '.join(sorted(qualified))} are): use the image's own vLLM, or qualify this one"
        )
    differing = changed(fingerprints(folder), qualified[version])
    if differing:
        more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
        raise OverlayError(
            f"{folder} says that it is vLLM {version}, but its {differing[0]}{more} is not that of the release: install the release unchanged"
        )


def main() -> None:
    """The command line: what differs, and how to take a version in."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="the folder vllm of an unpacked wheel; without it the installed one")
    parser.add_argument("--version", help="its version; without it the installed one's")
    parser.add_argument("--write", action="store_true", help="take it into qualified.json; run all tests with it first")
    options = parser.parse_args()
    version, folder = (options.version, options.folder) if options.folder else installed()
    if options.folder and not version:
        parser.error("with FOLDER, --version says what it is")
    now, qualified = fingerprints(folder), table()
    print(f"vLLM {version} in {folder}: {'qualified' if version in qualified else 'not qualified'}")
    for known, prints in sorted(qualified.items()):
        differing = changed(now, prints)
        print(f"  against {known}: {len(differing)} of {len(SYMBOLS)} differ")
        for symbol in differing:
            print(f"    {'missing' if not now[symbol] else 'missing there' if not prints.get(symbol) else 'changed'}  {symbol}")
    if options.write:
        TABLE.write_text(json.dumps(dict(sorted({**qualified, version: now}.items())), indent=1) + "\n")


if __name__ == "__main__":
    main()
