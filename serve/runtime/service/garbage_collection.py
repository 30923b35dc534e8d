"""The garbage collector of a process that serves: what lives when it is ready is passed over from then on."""

from __future__ import annotations

import gc


def freeze_heap() -> None:
    """Collect now, and leave what is left out of later collections.

    torch and its like keep 250,000 objects. CPython 3.11 looks at all of them again once enough others have piled up:
    no thread runs meanwhile, and requests waited 0.1 s for it. Call it when models were opened or closed: what was
    left out before is looked at once more, so that a closed model is freed.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
