"""lm-eval: loglikelihood and generate_until on tasks of ours.

They equal what its own backend for transformers gives, in float32.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager

from common import MODEL, URL

FILES = os.environ["BATON_MODEL_FILES"]  # the model's directory
QUESTIONS = [
    {"ask": "os.path.join", "right": " Join two paths", "wrong": " Sort a list"},
    {"ask": "list.sort", "right": " Sort the list in place", "wrong": " Open a file"},
    {"ask": "open", "right": " Open a file", "wrong": " Sleep for a second"},
    {"ask": "len", "right": " Return the length", "wrong": " Return a copy of the set"},
]


def write_tasks(folder: Path) -> None:
    """A task of each kind over local JSON."""
    (folder / "questions.json").write_text("".join(json.dumps(one) + "\n" for one in QUESTIONS))
    common = f"""
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/questions.json}}}}
test_split: test
doc_to_text: "What does {{{{ask}}}} do?"
"""
    (folder / "choose.yaml").write_text(f"""
task: choose
output_type: multiple_choice
doc_to_choice: ["{{{{right}}}}", "{{{{wrong}}}}"]
doc_to_target: 0
metric_list: [{{metric: acc}}]
{common}""")
    (folder / "say.yaml").write_text(f"""
task: say
output_type: generate_until
doc_to_target: "{{{{right}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 128, do_sample: false}}
metric_list: [{{metric: exact_match}}]
{common}""")


def evaluate(folder: Path, backend: str, arguments: dict[str, Any]) -> dict[str, list[Any]]:
    """The answers of each task, in the order of the questions."""
    found = lm_eval.simple_evaluate(
        backend, model_args=arguments, tasks=["choose", "say"], log_samples=True, batch_size=1,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False), bootstrap_iters=0,
    )  # fmt: skip
    assert found is not None
    samples = {name: sorted(rows, key=lambda row: row["doc_id"]) for name, rows in found["samples"].items()}
    return {name: [row["filtered_resps"] for row in rows] for name, rows in samples.items()}


with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    write_tasks(folder)
    served = evaluate(folder, "local-completions", {
        "model": MODEL, "base_url": f"{URL}/v1/completions", "tokenizer": FILES,
        "tokenizer_backend": "huggingface",
        "max_length": 1024, "num_concurrent": 2, "max_retries": 1, "seed": 0,
    })  # fmt: skip
    own = evaluate(
        folder, "hf", {"pretrained": FILES, "dtype": "float32", "device": "cpu", "max_length": 1024}
    )
assert served["say"] == own["say"], (served["say"], own["say"])
for ours, theirs in zip(served["choose"], own["choose"], strict=True):
    for (score, greedy), (score_hf, greedy_hf) in zip(ours, theirs, strict=True):
        assert abs(float(score) - float(score_hf)) < 1e-3, (score, score_hf)
        assert str(greedy) == str(greedy_hf), (greedy, greedy_hf)
