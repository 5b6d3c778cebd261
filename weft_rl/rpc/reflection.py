"""Server reflection: a server's services, with the comments of their protos.

Imported by server processes only. grpcio's own servicer finds neither methods nor fields, and
stubs carry no comments. Both are read from a set of descriptors beside the stubs.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Final

import grpc
from google.protobuf import descriptor, descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection_pb2 as pb  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection_pb2_grpc

REFLECTION_V1: Final = "grpc.reflection.v1.ServerReflection"
REFLECTION_V1ALPHA: Final = "grpc.reflection.v1alpha.ServerReflection"
_DESCRIPTORS: Final = "descriptors_pb2.binpb"

FileProto = descriptor_pb2.FileDescriptorProto


class ReflectionServicer(reflection_pb2_grpc.ServerReflectionServicer):  # type: ignore[misc]
    """Read-only reflection service over the default pool of descriptors."""

    def __init__(self, services: Sequence[str]) -> None:
        self._services = sorted(services)
        self._pool = descriptor_pool.Default()

    async def ServerReflectionInfo(  # noqa: N802 (named as in the proto)
        self, requests: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[Any]:
        """Answer each question in turn."""
        async for request in requests:
            try:
                answer = self._answer(request)
            except KeyError:
                answer = _error(grpc.StatusCode.NOT_FOUND, "no such name is known here")
            answer.original_request.CopyFrom(request)
            answer.valid_host = request.host
            yield answer

    def _answer(self, request: Any) -> Any:
        """Answer one question; ``KeyError`` if the name is unknown."""
        match request.WhichOneof("message_request"):
            case "list_services":
                listed = [pb.ServiceResponse(name=name) for name in self._services]
                return pb.ServerReflectionResponse(
                    list_services_response=pb.ListServiceResponse(service=listed)
                )
            case "file_by_filename":
                return _files(self._pool.FindFileByName(request.file_by_filename))
            case "file_containing_symbol":
                return _files(file_of(self._pool, request.file_containing_symbol))
            case "file_containing_extension":
                asked = request.file_containing_extension
                extended = self._pool.FindMessageTypeByName(asked.containing_type)
                number = asked.extension_number
                found = self._pool.FindExtensionByNumber(extended, number)
                return _files(file_of(self._pool, found.full_name))
            case "all_extension_numbers_of_type":
                name = request.all_extension_numbers_of_type
                every = self._pool.FindAllExtensions(self._pool.FindMessageTypeByName(name))
                return pb.ServerReflectionResponse(
                    all_extension_numbers_response=pb.ExtensionNumberResponse(
                        base_type_name=name,
                        extension_number=sorted(extension.number for extension in every),
                    )
                )
            case _:
                return _error(grpc.StatusCode.INVALID_ARGUMENT, "the request asks for nothing")


def file_of(pool: descriptor_pool.DescriptorPool, name: str) -> descriptor.FileDescriptor:
    """Return the file that defines a name.

    The name is of a service, a message, an enum, or a method, field or value of one.

    Raises:
        KeyError: Nothing is called so.
    """
    try:
        return pool.FindFileContainingSymbol(name)
    except KeyError:
        owner, _, member = name.rpartition(".")
        defines = pool.FindFileContainingSymbol(owner)
        if member in _members(pool, owner):
            return defines
        raise


def _members(pool: descriptor_pool.DescriptorPool, owner: str) -> Iterable[str]:
    try:
        return pool.FindServiceByName(owner).methods_by_name
    except KeyError:
        pass
    try:
        message = pool.FindMessageTypeByName(owner)
        return {*message.fields_by_name, *message.oneofs_by_name}
    except KeyError:
        return pool.FindEnumTypeByName(owner).values_by_name


def _files(file: descriptor.FileDescriptor) -> Any:
    """Return a response with a file, and after it all that it depends on."""
    found: dict[str, bytes] = {}

    def add(file: descriptor.FileDescriptor) -> None:
        if file.name not in found:
            for dependency in file.dependencies:
                add(dependency)
            found[file.name] = described(file).SerializeToString()

    add(file)
    response = pb.FileDescriptorResponse(file_descriptor_proto=reversed(found.values()))
    return pb.ServerReflectionResponse(file_descriptor_response=response)


def described(file: descriptor.FileDescriptor) -> FileProto:
    """Return a file's proto as its stubs have it, with its comments where these are known."""
    plain = FileProto()
    file.CopyToProto(plain)
    commented = _commented().get(file.name)
    # Comments of another state of the file would be shown at the wrong places.
    return commented if commented is not None and _bare(commented) == _bare(plain) else plain


def _bare(file: FileProto) -> bytes:
    """Serialise what both generators say of a file: all but comments and JSON names."""
    bare = FileProto()
    bare.CopyFrom(file)
    bare.ClearField("source_code_info")
    messages = [*bare.message_type]
    while messages:
        message = messages.pop()
        messages += message.nested_type
        for field in (*message.field, *message.extension):
            field.ClearField("json_name")
    return bare.SerializeToString(deterministic=True)


@cache
def _commented() -> dict[str, FileProto]:
    """Return Weft's files with their comments, by name."""
    data = files("weft_rl.v1").joinpath(_DESCRIPTORS).read_bytes()
    return {file.name: file for file in descriptor_pb2.FileDescriptorSet.FromString(data).file}


def _error(code: grpc.StatusCode, message: str) -> Any:
    return pb.ServerReflectionResponse(
        error_response=pb.ErrorResponse(error_code=code.value[0], error_message=message)
    )


def add_reflection(server: grpc.aio.Server, names: list[str]) -> None:
    """Register reflection of services as v1alpha and as v1: the messages are the same."""
    _describe_v1()
    servicer = ReflectionServicer([*names, REFLECTION_V1ALPHA, REFLECTION_V1])
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=pb.ServerReflectionRequest.FromString,
        response_serializer=pb.ServerReflectionResponse.SerializeToString,
    )
    generic = grpc.method_handlers_generic_handler(REFLECTION_V1, {"ServerReflectionInfo": handler})
    server.add_generic_rpc_handlers((generic,))


def _describe_v1() -> None:
    """Add v1's file, which is v1alpha's but for its package, to the pool of descriptors."""
    pool = descriptor_pool.Default()
    name = "grpc/reflection/v1/reflection.proto"
    try:
        pool.FindFileByName(name)
    except KeyError:
        proto = FileProto.FromString(pb.DESCRIPTOR.serialized_pb)
        _rename(proto)
        proto.name = name
        pool.AddSerializedFile(proto.SerializeToString())


def _rename(proto: FileProto) -> None:
    old, new = ".grpc.reflection.v1alpha.", ".grpc.reflection.v1."
    proto.package = new.strip(".")
    for message in proto.message_type:
        for field in message.field:
            if field.type_name:
                field.type_name = field.type_name.replace(old, new)
    for service in proto.service:
        for method in service.method:
            method.input_type = method.input_type.replace(old, new)
            method.output_type = method.output_type.replace(old, new)
