"""guidellm: a short benchmark; every request of it succeeds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from common import MODEL, URL

with tempfile.TemporaryDirectory() as folder:
    for api in ("/v1/completions", "/v1/chat/completions"):
        done = subprocess.run(
            [
                sys.executable, "-m", "guidellm", "run", "--disable-console",
                "--backend", f"kind=openai_http,target={URL},model={MODEL},request_format={api}",
                "--tokenizer", f"kind=hf_auto,model={os.environ['BATON_MODEL_FILES']}",
                "--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6",
                "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16",
                "--output", f"kind=json,path={folder}/out.json",
            ],
            capture_output=True, text=True, timeout=240,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        report = json.loads(Path(folder, "out.json").read_text())
        requests = report["benchmarks"][0]["requests"]
        assert len(requests["successful"]) == 6, requests["errored"]
        assert not requests["errored"]
        assert all(one["output_tokens"] == 16 for one in requests["successful"]), requests["successful"][0]
