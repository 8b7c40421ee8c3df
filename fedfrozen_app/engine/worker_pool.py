"""Worker processes that run clients, and survive the death of one."""

import importlib
import os
import shutil
import signal
import threading
import traceback
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import cast

from flwr.app import ArrayRecord, Context, Error, Message
from flwr.clientapp import ClientApp
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.supercore.task_identity import TaskIdentity

from fedfrozen_app.engine import handover
from fedfrozen_app.engine.interrupts import handled, signals_ignored


def load_app(reference: str) -> ClientApp:
    """Import a ClientApp named ``module:attribute``."""
    module, _, attribute = reference.partition(":")
    return cast(ClientApp, getattr(importlib.import_module(module), attribute))


def call(app: ClientApp, message: Message, context: Context) -> Message:
    """Run the ClientApp on one message; an exception becomes an error reply, as in Flower."""
    try:
        return app(message, context)
    except Exception as error:  # whatever a client raises must not end the server
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{os.path.basename(last.filename)}:{last.lineno}"
        reason = f"{type(error).__name__}: {error} ({where})"
        return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)


@dataclass
class Pending:
    """A message that some worker is at."""

    message: Message
    context: Context
    executor: ProcessPoolExecutor
    future: "Future[handover.Parcel]"


class WorkerPool:
    """``jobs`` processes that run the ClientApp ``module:attribute``.

    Messages and replies pass through shared memory; arrays that many messages share are written
    there once and stay until :meth:`clear`. The processes end with this one,
    whatever ends it, and Ctrl-C is left to this one.
    """

    def __init__(self, reference: str, jobs: int) -> None:
        self._reference = reference
        self._jobs = jobs
        self._folder = handover.new_folder()
        self._shelf = handover.Shelf(ArrayRecord, self._folder)
        self._executor: ProcessPoolExecutor | None = None

    @property
    def folder(self) -> Path:
        """Where parcels to and from the workers wait."""
        return self._folder

    def submit(self, message: Message, context: Context) -> Pending:
        """Hand a message to the next free worker."""
        parcels = (
            handover.pack(message, self._folder, self._shelf),
            handover.pack(context, self._folder),
        )
        while True:
            executor = self._workers()
            try:
                # a worker started here inherits that: Ctrl-C is left to this process
                with handled(signal.SIG_IGN, signal.SIGINT):
                    future = executor.submit(_work, self._reference, parcels, self._folder)
                return Pending(message, context, executor, future)
            except BrokenProcessPool:
                self._executor = None

    def _workers(self) -> ProcessPoolExecutor:
        if self._executor is None:
            self._executor = ProcessPoolExecutor(
                self._jobs,
                mp_context=get_context("spawn"),
                initializer=_start_worker,
                initargs=(self._folder,),
            )
        return self._executor

    def result(self, pending: Pending) -> tuple[Message, Context]:
        """Wait for a reply and the context that the client left.

        A worker that died (killed for memory, say) makes error replies of all messages
        that were under way, since nobody knows which one did it; the next one gets new
        workers.
        """
        try:
            reply, context = handover.unpack(pending.future.result())
        except BrokenProcessPool:
            if self._executor is pending.executor:
                self._executor = None
            reason = "a worker process died; it may have run out of memory"
        except OSError as error:
            reason = f"the reply could not be handed over: {error}"
        else:
            return reply, context
        crash = Error(ErrorCode.CLIENT_APP_CRASHED, reason)
        return Message(crash, reply_to=pending.message), pending.context

    def clear(self) -> None:
        """Free the arrays of messages that have all been answered."""
        self._shelf.clear()

    def close(self, *, at_once: bool = False) -> None:
        """End the workers, ``at_once`` without waiting for the clients they are at."""
        with signals_ignored() if at_once else nullcontext():
            try:
                self._end_workers(at_once)
            finally:
                shutil.rmtree(self._folder, ignore_errors=True)

    def _end_workers(self, at_once: bool) -> None:
        if self._executor is None:
            return
        if at_once:
            for process in list((self._executor._processes or {}).values()):
                process.terminate()
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._executor = None


def _start_worker(folder: Path) -> None:
    """Prepare a worker process, which ends with its parent."""
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, SUPERLINK_NODE_ID


def _end_with_parent(folder: Path) -> None:
    if (parent := parent_process()) is not None:
        parent.join()
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)


def _work(
    reference: str, parcels: tuple[handover.Parcel, handover.Parcel], folder: Path
) -> handover.Parcel:
    message, context = map(handover.unpack, parcels)
    reply = call(load_app(reference), message, context)
    return handover.pack((reply, context), folder)
