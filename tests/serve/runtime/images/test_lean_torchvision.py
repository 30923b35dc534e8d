"""torchvision comes without torch's compiler, and loses nothing by it."""

from __future__ import annotations

import pytest

from tests.programs import Programs

BEGIN = "import sys; from serve.runtime.images.lean_torchvision import functional, torchvision; import torch; "


def run(programs: Programs, code: str, begin: str = BEGIN) -> str:
    """What a program prints; torch is torchvision's own first import, so that it may be there before."""
    done = programs.run("-c", begin + code)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("module", ["optimize.api", "serve.runtime.service.execution_chain"])
def test_what_needs_torchvision_does_not_wait_for_the_compiler(torch_begun: Programs, module: str) -> None:
    code = f"import sys, {module}; print('torchvision' in sys.modules, 'torch._dynamo' in sys.modules)"
    assert run(torch_begun, code, begin="") == "True False"


def test_what_asks_for_the_compiler_gets_it(torch_begun: Programs) -> None:
    code = (
        "x = torch.rand(1, 3, 8, 8); box = [torch.tensor([[0.0, 0, 4, 4]])];"
        "found = torchvision.ops.roi_align(x, box, 2);"
        "assert 'torch._dynamo' not in sys.modules;"
        "supported = torchvision.ops.roi_align.__globals__['is_compile_supported']('cpu');"
        "from torch._dynamo.utils import is_compile_supported as real;"
        "assert supported == real('cpu') and real.__module__ == 'torch._dynamo.utils';"
        "print(torch._dynamo.__file__, tuple(found.shape))"
    )
    file, shape = run(torch_begun, code).split(" ", 1)
    assert file.endswith("/torch/_dynamo/__init__.py")
    assert shape == "(1, 3, 2, 2)"


def test_what_is_not_to_be_compiled_is_not(torch_begun: Programs) -> None:
    code = (
        "from torchvision import tv_tensors; image = tv_tensors.Image(torch.zeros(3, 4, 4, dtype=torch.uint8));"
        "plain = tv_tensors.wrap(torch.ones(3, 4, 4, dtype=torch.uint8), like=image);"
        "assert 'torch._dynamo' not in sys.modules and type(plain) is tv_tensors.Image;"
        "import torch._dynamo; seen = [];"
        "compile = torch.compile(lambda x: tv_tensors.wrap(x + 1, like=image) + 1,"
        " backend=lambda graph, inputs: seen.append(graph) or graph.forward);"
        "assert compile(torch.ones(3, 4, 4)).eq(3).all();"
        "print(len(seen))"
    )
    assert run(torch_begun, code) == "2"  # graphs: before it and after it; one, were it compiled


def test_where_the_compiler_is_there_already_nothing_stands_in(torch_begun: Programs) -> None:
    code = "print(torchvision.ops.roi_align.__globals__['is_compile_supported'].__module__)"
    assert run(torch_begun, code, begin=f"import torch._dynamo; {BEGIN}") == "torch._dynamo.utils"
