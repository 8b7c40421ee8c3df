"""Ask a part of a deployment whether it is up; end with 0 if it says so.

health.py https://localhost:8000/health CA_FILE    the SuperLink
health.py http://127.0.0.1:9094/health             a SuperNode
health.py 127.0.0.1:9095                           a SuperExec, by gRPC
"""

import ssl
import sys
import urllib.request

SECONDS = 5


def http(url: str, ca_file: str | None) -> bool:
    """Whether a GET is answered with 200."""
    context = ssl.create_default_context(cafile=ca_file) if ca_file else None
    handlers = [urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)]
    with urllib.request.build_opener(*handlers).open(url, timeout=SECONDS) as response:
        return bool(response.status == 200)


def grpc(address: str) -> bool:
    """Whether gRPC's health service says SERVING."""
    from grpc import insecure_channel
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=SECONDS)
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


def main(target: str, ca_file: str | None = None) -> int:
    """Print what is wrong, if anything is."""
    try:
        up = http(target, ca_file) if "://" in target else grpc(target)
    except Exception as error:
        print(f"{target}: {type(error).__name__}: {error}")
        return 1
    return 0 if up else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
