"""The signatures of FlashInfer's wrappers: those of the installed package, else those recorded by version.

python -m tests.support.flashinfer_record DIRECTORY    records an unpacked wheel's (nothing is imported)
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from functools import cache
from pathlib import Path

RECORDS = Path(__file__).parents[1] / "data" / "flashinfer"
METHODS = ("__init__", "plan", "run", "csr")
SOURCES = {
    "BatchPrefillWithPagedKVCacheWrapper": "prefill.py",
    "BatchAttentionWithAttentionSinkWrapper": "attention/_core.py",
    "BatchMLAPagedAttentionWrapper": "mla/_batch_mla/_wrapper.py",
    "MLAPlanMetadata": "mla/_batch_mla/_contracts.py",
}
FUNCTIONS = {
    "rmsnorm": "norm/__init__.py",
    "fused_add_rmsnorm": "norm/__init__.py",
    "gemma_rmsnorm": "norm/__init__.py",
    "gemma_fused_add_rmsnorm": "norm/__init__.py",
    "silu_and_mul": "activation.py",
    "gelu_tanh_and_mul": "activation.py",
    "apply_rope_with_cos_sin_cache_inplace": "rope.py",
}
PARENTS = {"BatchAttentionWithAttentionSinkWrapper": "BatchPrefillWithPagedKVCacheWrapper"}

Parameters = list[tuple[str, str, bool]]  # name, kind, whether it must be given


def recorded_version() -> str:
    """The newest version that is recorded."""
    return max(path.stem for path in RECORDS.glob("*.json"))


@cache
def signature(wrapper: str, method: str) -> inspect.Signature:
    """The parameters of one method, `self` left out."""
    record = json.loads((RECORDS / f"{recorded_version()}.json").read_text())
    return _signature(record[wrapper].get(method) or record[PARENTS[wrapper]][method])


@cache
def function_signature(name: str) -> inspect.Signature:
    """The parameters of a function."""
    return _signature(json.loads((RECORDS / f"{recorded_version()}.json").read_text())["functions"][name])


def _signature(parameters: Parameters) -> inspect.Signature:
    return inspect.Signature(
        [
            inspect.Parameter(
                name,
                inspect._ParameterKind[kind],
                default=inspect.Parameter.empty if required else None,
            )
            for name, kind, required in parameters
        ]
    )


def read(root: Path) -> dict[str, dict[str, Parameters]]:
    """The parameters of the wrappers and functions in an unpacked wheel or a site-packages directory."""
    functions = {
        name: _function((root / "flashinfer" / file).read_text(), name) for name, file in FUNCTIONS.items()
    }
    wrappers = {
        wrapper: _methods((root / "flashinfer" / file).read_text(), wrapper)
        for wrapper, file in SOURCES.items()
    }
    return {**wrappers, "functions": functions}


def _function(source: str, name: str) -> Parameters:
    [node] = [n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == name]
    return _parameters(node.args, bound=False)


def _methods(source: str, wrapper: str) -> dict[str, Parameters]:
    """Of overloads the last definition counts: it is the one that runs."""
    [node] = [n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == wrapper]
    return {
        method.name: _parameters(method.args)
        for method in node.body
        if isinstance(method, ast.FunctionDef) and method.name in METHODS
    }


def _parameters(args: ast.arguments, bound: bool = True) -> Parameters:
    """Without `self` if they are those of a method."""
    plain = [arg.arg for arg in (*args.posonlyargs, *args.args)][1 if bound else 0 :]
    required = len(plain) - len(args.defaults)
    found = [(name, "POSITIONAL_OR_KEYWORD", i < required) for i, name in enumerate(plain)]
    if args.vararg is not None:
        found.append((args.vararg.arg, "VAR_POSITIONAL", True))
    found += [
        (arg.arg, "KEYWORD_ONLY", default is None)
        for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]
    if args.kwarg is not None:
        found.append((args.kwarg.arg, "VAR_KEYWORD", True))
    return found


def main() -> None:
    root = Path(sys.argv[1])
    [info] = root.glob("flashinfer_python-*.dist-info")
    version = info.name.removesuffix(".dist-info").split("-")[1]
    path = RECORDS / f"{version}.json"
    lines = [
        f' "{wrapper}": {{\n'
        + ",\n".join(f'  "{method}": {json.dumps(found)}' for method, found in methods.items())
        + "\n }"
        for wrapper, methods in read(root).items()
    ]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
