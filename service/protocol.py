"""uvicorn's HTTP/1.1, with a problem document for what is no HTTP at all and reaches no application."""

import logging
from uuid import uuid4

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from service.bodies import LINGER_S
from service.problems import MEDIA_TYPE, plain_problem
from service.requests import HEADER

log = logging.getLogger(__name__)


class Http(H11Protocol):
    _refused = False

    def data_received(self, data: bytes) -> None:
        if not self._refused:
            super().data_received(data)

    def send_400_response(self, msg: str) -> None:
        """Answer, and close the connection: where the next request would begin is not known.

        Not at once: on a client that still sends, its answer would be lost with that.
        """
        request_id = uuid4().hex
        detail = "this is no HTTP/1.1 request: its first line, a header or its body's length is malformed"
        problem = plain_problem(400, detail, None).model_copy(update={"request_id": request_id})
        body = problem.model_dump_json().encode()
        headers = {
            "content-type": MEDIA_TYPE,
            "content-length": str(len(body)),
            "connection": "close",
            HEADER.lower(): request_id,
        }
        if self.conn.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            for event in (
                h11.Response(status_code=400, headers=list(headers.items()), reason="Bad Request"),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self._refused = True
        if self.cycle is not None:  # what the application would still say, nobody could read
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.transport.can_write_eof() and not self.transport.is_closing():
            self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)
