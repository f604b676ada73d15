"""Lines -> outcomes: what each line gives, or why it gives nothing. In this process, and from some size on in several.

Every outcome depends on its line alone, and they come in the order of the lines, so how many processes work changes
nothing but the time. A few chunks are on their way at once, so memory does not grow with the data.
"""

import hashlib
import multiprocessing
import os
import pickle
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import chain, islice
from multiprocessing import connection
from typing import NamedTuple

from numpy.typing import NDArray

from dflash.data.conversations import BadLineError, Conversation, parse_line
from dflash.data.render import Document, Mask, Renderer, render_documents
from dflash.data.sources import Source
from dflash.errors import DflashError
from dflash.files import canonical_json
from dflash.progress import say

CUT_OFF, TOO_FEW, TRUNCATED = "answer_beyond_ceiling", "too_few_supervised", "truncated"
CHUNK_LINES, CHUNK_BYTES = 256, 1 << 20
ALONE_CHUNKS = 16  # as many as this process does before it starts others, which takes seconds
WAITING = 4  # chunks that are under way for each process

Fitted = tuple[NDArray, NDArray, bool]  # tokens, mask, whether the end was cut off


class Chunk(NamedTuple):
    """Lines of a file, the first of which has the number `first`."""

    file: int
    first: int
    lines: list[bytes]


class Outcome(NamedTuple):
    """What became of a line."""

    line: int
    cause: str = ""  # why it gives no document
    problem: str = ""  # where it is damaged: what is wrong with it
    digest: bytes = b""  # the conversation's, 16 bytes, where one could be read
    opening: bytes = b""  # 8 bytes of the digest of what comes before the first answer
    documents: tuple[Fitted, ...] = ()
    lost: tuple[tuple[str, int], ...] = ()  # documents of no use: (cause, tokens)
    beyond: int = 0  # tokens cut off
    args: str = ""  # the template arguments as JSON, where the line brings some of its own


@dataclass(frozen=True)
class Job:
    """What a process needs to know to turn lines into outcomes."""

    renderer: Renderer
    ceiling: int

    def outcomes(self, chunk: Chunk) -> list[Outcome]:
        return [self._outcome(raw, chunk.file, chunk.first + i) for i, raw in enumerate(chunk.lines)]

    def _outcome(self, raw: bytes, file: int, line: int) -> Outcome:
        if not raw.strip():
            return Outcome(line, "blank_line")
        digest = opening = b""
        try:
            conversation = parse_line(raw, file, line)
            digest = hashlib.sha256(conversation.canonical).digest()[:16]
            opening = hashlib.sha256(conversation.opening).digest()[:8]
            documents = self._documents(conversation)
        except BadLineError as error:
            return Outcome(line, error.cause, str(error), digest)
        if isinstance(documents, str):
            return Outcome(line, documents, "", digest)
        kept, lost, beyond = [], [], 0
        for document in documents:
            fitted, length = fit(document, self.ceiling), len(document[0])
            if isinstance(fitted, str):
                lost.append((fitted, length))
            else:
                kept.append(fitted)
                beyond += length - len(fitted[0])
        cause = "" if kept else lost[0][0]
        args = canonical_json({**self.renderer.template_args, **own}) if (own := conversation.template_args) else ""
        return Outcome(line, cause, "", digest, opening, tuple(kept), tuple(lost), beyond, args)

    def _documents(self, conversation: Conversation) -> list[Document] | str:
        renderer = self.renderer
        if renderer.tokenizer is None and conversation.kind != "tokens":
            raise BadLineError("no_tokenizer", "it is text, but the target has no tokenizer")
        documents = render_documents(conversation, renderer)
        if renderer.vocab_size is not None and not isinstance(documents, str):
            highest = max((int(tokens.max()) for tokens, _ in documents if len(tokens)), default=0)
            if highest >= renderer.vocab_size:
                what = f"it holds the token id {highest}, but the target's embedding has {renderer.vocab_size} rows"
                raise BadLineError("token_outside_vocabulary", what)
        return documents


def fit(document: Document, ceiling: int) -> Fitted | str:
    """(tokens, mask, cut) of at most `ceiling` tokens; or why the document is of no use."""
    tokens, mask = document
    if not has_neighbours(mask):
        return TOO_FEW
    if len(tokens) <= ceiling:
        return tokens, mask, False
    return (tokens[:ceiling], mask[:ceiling], True) if has_neighbours(mask[:ceiling]) else CUT_OFF


def has_neighbours(mask: Mask) -> bool:
    """Two supervised tokens side by side: the least that makes an anchor with something to predict."""
    return bool((mask[:-1] & mask[1:]).any())


def chunks_of(source: Source, file: int) -> Iterator[Chunk]:
    """The lines of a source in chunks of some hundred, of fewer where lines are long."""
    lines: list[bytes] = []
    size, first = 0, 1
    for number, raw in source.lines():
        if lines and (len(lines) == CHUNK_LINES or size + len(raw) > CHUNK_BYTES):
            yield Chunk(file, first, lines)
            lines, size, first = [], 0, number
        lines.append(raw)
        size += len(raw)
    if lines:
        yield Chunk(file, first, lines)


class Tokeniser:
    """Outcomes of chunks in order. Use as a context: leaving it ends the processes."""

    def __init__(self, job: Job, processes: int | None = None) -> None:
        self.job = job
        self.processes = processes or len(os.sched_getaffinity(0))
        self._pool: ProcessPoolExecutor | None = None
        self._alone = ALONE_CHUNKS

    def __enter__(self) -> "Tokeniser":
        return self

    def __exit__(self, *args: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def outcomes(self, chunks: Iterable[Chunk]) -> Iterator[Outcome]:
        rest = iter(chunks)
        for chunk in islice(rest, self._alone):
            self._alone -= 1
            yield from self.job.outcomes(chunk)
        if (following := next(rest, None)) is None:
            return
        if self._pool is None and self.processes > 1:
            self._pool = start_pool(self.job, self.processes)
        if self._pool is None:
            self.processes = 1
            for chunk in chain([following], rest):
                yield from self.job.outcomes(chunk)
            return
        yield from self._shared(self._pool, following, rest)

    def _shared(self, pool: ProcessPoolExecutor, first: Chunk, rest: Iterator[Chunk]) -> Iterator[Outcome]:
        """The oldest chunk is waited for while those behind it are worked on."""
        waiting: deque[Future[list[Outcome]]] = deque([pool.submit(_outcomes, first)])
        try:
            for chunk in rest:
                waiting.append(pool.submit(_outcomes, chunk))
                if len(waiting) >= WAITING * self.processes:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
        except BrokenProcessPool:
            raise DflashError(
                "A process that tokenises --data was killed, perhaps for want of memory, so nothing is kept: "
                "run the same command again."
            ) from None


def start_pool(job: Job, processes: int) -> ProcessPoolExecutor | None:
    """Processes that hold the job; None where the tokenizer cannot be sent to them."""
    try:
        packed = pickle.dumps(job)
    except Exception as error:  # a tokenizer with code of its own may hold anything
        say(f"Tokenising in one process, since this tokenizer cannot be copied ({' '.join(str(error).split())}).")
        return None
    # Threads run here already, so a plain fork is not safe; the server's children are forked from a clean process.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, type(job.renderer.tokenizer).__module__])
    try:
        return ProcessPoolExecutor(processes, context, _start, (packed,))
    except (OSError, ImportError) as error:  # no semaphores here, as in some sandboxes
        say(f"Tokenising in one process, since others cannot be started here ({error}).")
        return None


_job: Job | None = None


def _start(packed: bytes) -> None:
    """Begin a process: a stop is the parent's business, and without a parent there is no work."""
    global _job
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _job = pickle.loads(packed)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def _outcomes(chunk: Chunk) -> list[Outcome]:
    assert _job is not None
    return _job.outcomes(chunk)
