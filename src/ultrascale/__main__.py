"""The command: `ultrascale`, `python -m ultrascale`, and what torchrun starts on each rank.

Ctrl-C is met before anything else is imported. An exception may come up anywhere in an import, and libraries swallow it
there, or turn it into one of their own: so while something is imported, and before and after the verb, the process ends at
once. Elsewhere it is a KeyboardInterrupt, as usual. While Python itself ends, it is ignored: what was asked for is done.
"""

# signal itself imports enum first, and a Ctrl-C in there would be a traceback.
import _signal as signal  # pyright: ignore[reportMissingImports]
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType

STOPPED = 130


def _leave(number: int, frame: "FrameType | None") -> None:
    os.write(2, b"ultrascale: error: stopped.\n")
    os._exit(STOPPED)


def _interrupt(number: int, frame: "FrameType | None") -> None:
    caller = frame
    while caller is not None:
        if caller.f_code.co_filename.startswith("<frozen importlib"):
            _leave(number, frame)
        caller = caller.f_back
    raise KeyboardInterrupt


def _handle(handler: object, *, instead_of: object) -> None:
    if signal.getsignal(signal.SIGINT) is instead_of:  # and neither ignored nor handled by a verb for longer
        signal.signal(signal.SIGINT, handler)  # pyright: ignore[reportArgumentType]


_handle(_leave, instead_of=signal.default_int_handler)


def main() -> int:
    """Run the command that the process was started with; returns its exit code."""
    import atexit
    import gc

    plans = sys.argv[1:2] == ["plan"]
    if plans:
        gc.disable()  # the process ends with its one answer: to look for cycles was 7 percent of a search
    from ultrascale.garbage import collect_rarely

    collect_rarely()
    from ultrascale.cli.main import main

    atexit.register(_handle, signal.SIG_IGN, instead_of=_leave)  # runs last: from there on the system would kill the process
    try:
        _handle(_interrupt, instead_of=_leave)
        if "RANK" in os.environ:
            from ultrascale.launch.orphans import end_with_starter

            end_with_starter()
        code = main()
        gc.freeze()  # nor does Python look for them when it ends
        return code
    except KeyboardInterrupt:  # before or after the verb, which has told it otherwise
        return STOPPED
    finally:
        _handle(_leave, instead_of=_interrupt)


if __name__ == "__main__":
    sys.exit(main())
