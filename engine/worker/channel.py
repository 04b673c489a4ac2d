"""The pipe between the main process and a worker: whole messages, never torn ones."""

import logging
import os
import socket
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait

from engine.messages import (
    FromWorker,
    LogLine,
    ToWorker,
    decode_from_worker,
    decode_to_worker,
    encode,
)


class ChannelClosedError(Exception):
    """The other side is gone."""


class ChannelStuckError(Exception):
    """The other side is there, but does not read."""


class Channel:
    """One end of the pipe. Any thread may send, one at a time may receive."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()

    @staticmethod
    def pair(send_timeout_seconds: float) -> tuple["Channel", "Channel"]:
        """Return the two ends of a new pipe: the main process's and the worker's.

        A message that is larger than the pipe waits for its reader; the main process waits for
        send_timeout_seconds at most, so that a worker that hangs does not take it along.
        """
        ours, theirs = Pipe(duplex=True)
        _limit_sending(ours, send_timeout_seconds)
        return Channel(ours), Channel(theirs)

    @staticmethod
    def inherited(file_descriptor: int) -> "Channel":
        """Take up the end that the parent process left open for this one."""
        return Channel(Connection(file_descriptor))

    @staticmethod
    def wait_for_any(channels: "Sequence[Channel]", timeout_seconds: float) -> "list[Channel]":
        """Return the channels where a message, or the end, can be read; none after the time-out."""
        ready = wait([channel._connection for channel in channels], max(0.0, timeout_seconds))
        return [channel for channel in channels if channel._connection in ready]

    @property
    def file_descriptor(self) -> int:
        """The number to pass on to a child process."""
        return self._connection.fileno()

    def send(self, message: ToWorker | FromWorker) -> None:
        """Send one message.

        Raises:
            ChannelClosedError: the other side is gone.
            ChannelStuckError: it has not read for too long; the pipe is of no use any more.
        """
        try:
            with self._sending:
                self._connection.send_bytes(encode(message))
        except BlockingIOError as error:
            raise ChannelStuckError(str(error)) from error
        except OSError as error:
            raise ChannelClosedError(str(error)) from error

    def receive_from_worker(self) -> FromWorker:
        """Return the next message of a worker.

        Raises:
            ChannelClosedError: the worker is gone.
        """
        return decode_from_worker(self._receive())

    def receive_in_worker(self) -> ToWorker:
        """Return the next message of the main process.

        Raises:
            ChannelClosedError: the main process is gone.
        """
        return decode_to_worker(self._receive())

    def close(self) -> None:
        """Close this end."""
        self._connection.close()

    def _receive(self) -> bytes:
        try:
            return self._connection.recv_bytes()
        except (EOFError, OSError) as error:
            raise ChannelClosedError(str(error)) from error


class LineSender(logging.Handler):
    """Sends what a worker logs to the main process, beside its log file."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record without its traceback; that is in the file, and all when nobody reads."""
        text = record.getMessage()
        if record.exc_info:
            text += f": {record.exc_info[1]!r}"
        line = LogLine(name=record.name, level=record.levelno, text=text)
        with suppress(ChannelClosedError):
            self._channel.send(line)


def _limit_sending(connection: Connection, timeout_seconds: float) -> None:
    seconds = max(int(timeout_seconds), 0)
    microseconds = max(int((timeout_seconds - seconds) * 1e6), 1)  # 0 in all would mean for ever
    limit = struct.pack("ll", seconds, microseconds)
    with socket.socket(fileno=os.dup(connection.fileno())) as endpoint:
        endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
