"""vLLM's own snapshot child on a CPU: `VLLMSNAPSHOT_SERVER=upstream`. Test code, mounted into the pod.

Nothing of it is changed but one gate: it asks for sleep mode, which vLLM refuses on CPU, where sleeping does nothing anyway.
"""

from typing import Any

from vllm.platforms import current_platform


def _available(_self: Any) -> bool:
    return True


type(current_platform).is_sleep_mode_available = _available

if __name__ == "__main__":
    from vllm.snapshot.server import main

    main()
