"""Asks a server by the clients of KServe's SDK, and prints what they were told, as JSON.

A program, because their stubs of the protocol and tritonclient's have the same names, and a process takes one of them.
Of the SDK no more is imported than its clients: the rest is a server, and wants older libraries than ours.

    python -m tests.serve.kserve_client HTTP-ADDRESS GRPC-ADDRESS TOKEN IMAGE...
"""

from __future__ import annotations

import asyncio
import base64
import importlib
import importlib.util
import json
import sys
import types
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

#: What the clients import, and nothing of ours does.
NEEDED = ("kserve", "cloudevents", "fastapi", "orjson")


def sdk(module: str) -> Any:
    """A module of the SDK without the SDK's ``__init__``, which imports all of it."""
    if "kserve" not in sys.modules:
        spec = importlib.util.find_spec("kserve")
        assert spec is not None
        sys.modules["kserve"] = package = types.ModuleType("kserve")
        package.__path__ = list(spec.submodule_search_locations or ())
    return importlib.import_module(f"kserve.{module}")


async def refusal(asking: Awaitable[object]) -> str:
    """What a client says of a request that is refused."""
    try:
        await asking
    except Exception as error:  # noqa: BLE001 - of httpx, of grpc
        return str(error)
    return "answered"


async def version_1(http: str, token: dict[str, str], images: list[bytes]) -> dict[str, Any]:
    """By the REST client, in KServe's version 1."""
    clients = sdk("inference_client")
    instances = [{"b64": base64.b64encode(image).decode()} for image in (*images, b"no image")]
    async with clients.InferenceRESTClient(clients.RESTConfig(protocol="v1")) as client:
        return {
            "live": await client.is_server_live(http),
            "ready": await client.is_model_ready(http, "small", headers=token),
            "answer": await client.infer(http, {"instances": instances}, model_name="small", headers=token),
            "no token": await refusal(client.infer(http, {"instances": instances}, model_name="small")),
            "no model": await refusal(client.is_model_ready(http, "smal", headers=token)),
            "explain": await refusal(client.explain(http, "small", {"instances": instances}, headers=token)),
        }


async def version_2(http: str, token: dict[str, str], images: list[bytes]) -> dict[str, Any]:
    """By the REST client, in the Open Inference Protocol: as binary data, and in JSON."""
    clients = sdk("inference_client")
    told: dict[str, Any] = {}
    async with clients.InferenceRESTClient(clients.RESTConfig(protocol="v2")) as client:
        told["live"] = await client.is_server_live(http)
        told["server"] = await client.is_server_ready(http)
        told["ready"] = await client.is_model_ready(http, "small", headers=token)
        for binary in (True, False):
            answer = await client.infer(http, request(images, binary=binary), model_name="small", headers={**token})
            told["binary" if binary else "json"] = outputs(answer)
        bad = request([*images, b"no image"], binary=True)
        told["no image"] = await refusal(client.infer(http, bad, model_name="small", headers={**token}))
    return told


async def grpc(address: str, token: dict[str, str], images: list[bytes]) -> dict[str, Any]:
    """By the gRPC client."""
    clients = sdk("inference_client")
    metadata = [(name.lower(), value) for name, value in token.items()]
    async with clients.InferenceGRPCClient(address) as client:
        return {
            "live": await client.is_server_live(),
            "server": await client.is_server_ready(),
            "ready": await client.is_model_ready("small", headers=metadata),
            "answer": outputs(await client.infer(request(images, binary=True), headers=metadata)),
        }


def request(images: list[bytes], *, binary: bool) -> Any:
    """Images as the SDK writes them."""
    import numpy as np

    kinds = sdk("protocol.infer_type")
    tensor = kinds.InferInput("image", [len(images)], "BYTES")
    texts = images if binary else [base64.b64encode(image) for image in images]
    tensor.set_data_from_numpy(np.array(texts, dtype=np.object_), binary_data=binary)
    wanted = [kinds.RequestedOutput(name, {"binary_data": binary}) for name in ("index", "probabilities")]
    return kinds.InferRequest("small", [tensor], request_id="mine", request_outputs=wanted)


def outputs(answer: Any) -> dict[str, Any]:
    """An answer's tensors as lists, and the request's id."""
    return {"id": answer.id} | {entry.name: entry.as_numpy().tolist() for entry in answer.outputs}


async def main(http: str, grpc_address: str, token: str, *paths: str) -> None:
    """Ask by each, and print what was told."""
    images, header = [Path(path).read_bytes() for path in paths], {"Authorization": f"Bearer {token}"}
    told = {
        "v1": await version_1(http, header, images),
        "v2": await version_2(http, header, images),
        "grpc": await grpc(grpc_address, header, images),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
