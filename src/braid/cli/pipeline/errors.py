"""The error of a Spark job in one sentence.

A Braid error that was raised in a task, or while Spark planned, comes back as the last line of a Python traceback
inside a Java stack trace inside a Python exception. That line is the sentence. An error without such a line is Spark's
own: its first line, without the stack trace, says most.
"""

from __future__ import annotations

import re
from typing import Final

from braid.model import errors
from braid.model.errors import BraidError, InvalidArgument, JobFailed

_RAISED: Final = re.compile(r"^\s*(?:[\w.]+: )?braid\.[\w.]*?(\w+): (\S.*)$", re.MULTILINE)
_PYTHON_RAISED: Final = re.compile(
    r"^(?!org\.|java\.|scala\.|py4j\.)[\w.]*?(\w+(?:Error|Exception)): (\S.*)$", re.MULTILINE
)
MAX_SENTENCE: Final = 500
"""Spark's own messages may carry whole query plans."""


def job_error(error: Exception) -> BraidError:
    """Return the error to show for an error of PySpark or Py4J."""
    text = str(error)
    ours = _RAISED.findall(text)
    if ours:
        name, sentence = ours[-1]
        kind = getattr(errors, name, BraidError)
        usage = isinstance(kind, type) and issubclass(kind, InvalidArgument)
        return InvalidArgument(sentence) if usage else BraidError(sentence)
    raised = _PYTHON_RAISED.findall(text)
    if raised:
        name, sentence = raised[-1]
        if name == "ModuleNotFoundError":
            return JobFailed(
                f"the Spark job failed: the Python of a worker cannot import what Braid needs ({_short(sentence)}); "
                "install 'braidmq[spark]' for it, or name another Python by PYSPARK_PYTHON"
            )
        return JobFailed(f"the Spark job failed: {name}: {_short(sentence)}")
    if isinstance(error, ConnectionError) or type(error).__name__ == "Py4JNetworkError":
        return JobFailed("the Spark job failed: its Java process has ended, or was killed")
    lines = text.strip().splitlines()
    return JobFailed(f"the Spark job failed: {_short(lines[0]) if lines else type(error).__name__}")


def _short(sentence: str) -> str:
    return sentence if len(sentence) <= MAX_SENTENCE else f"{sentence[:MAX_SENTENCE]}…"
