"""The description that a running worker gives of its model, its memory and its passes."""

import grpc

from specpool.protocol.responses import InvalidResponseError, check_worker_info
from specpool.rpc.security.channel import Connector
from specpool.rpc.status import status_line
from specpool.v1 import common_pb2, draft_worker_pb2_grpc, target_worker_pb2_grpc

ANSWER_SECONDS = 5.0


class NoDescriptionError(Exception):
    """A worker cannot be reached, or its answer cannot be used; the message says why in one line."""


def worker_info(connector: Connector, drafts: bool) -> common_pb2.GetWorkerInfoResponse:
    """The description of a draft worker, or of a target worker. NoDescriptionError."""
    stub = draft_worker_pb2_grpc.DraftWorkerServiceStub if drafts else target_worker_pb2_grpc.TargetWorkerServiceStub
    with connector.open_blocking() as channel:
        try:
            response = stub(channel).GetWorkerInfo(common_pb2.GetWorkerInfoRequest(), timeout=ANSWER_SECONDS)
            check_worker_info(response)
        except grpc.RpcError as error:
            reason = " ".join(status_line(error).split())
            raise NoDescriptionError(f"{connector.address}: {reason}") from None
        except InvalidResponseError as error:
            raise NoDescriptionError(f"{connector.address}: {error}") from None
    return response
