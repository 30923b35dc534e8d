"""An archive that refuses: what stands in for a model that is being removed, while it answers what it has accepted."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

_HANDLER = """\
import json
import os


class Gone:
    def initialize(self, context):
        pass

    def handle(self, data, context):
        answers = []
        for index in range(len(data)):
            asked = context.get_request_header(index, "describe") == "True"
            if not asked:
                context.set_response_status(404, "Not Found", idx=index)
            context.set_response_content_type(index, "application/json")
            answers.append(json.dumps({"pid": os.getpid()} if asked else {"error": %(message)r}).encode())
        return answers
"""


def build(destination: Path, model: str, version: str) -> Path:
    """Write an archive whose every answer is 404, and that needs nothing but TorchServe.

    Args:
        destination: the ``.mar`` to write.
        model: the name of the model that is removed.
        version: the version that this one is.
    """
    manifest = {
        "createdOn": "01/01/1980 00:00:00",
        "runtime": "python",
        "model": {"modelName": model, "handler": "gone.py", "modelVersion": version, "configFile": "model-config.yaml"},
        "archiverVersion": "0.12.0",
    }
    with zipfile.ZipFile(destination, "w") as archive:
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest))
        archive.writestr("gone.py", _HANDLER % {"message": f"Model not found: {model} has been removed"})
        archive.writestr("model-config.yaml", "batchSize: 64\nmaxBatchDelay: 1\ndeviceType: cpu\nresponseTimeout: 30\n")
    return destination
