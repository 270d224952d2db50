"""OpenAPI documents in, real HTTP calls on loopback, the same document out."""

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

from draft_docs.policy import Guard, Policy
from draft_docs.sources.openapi import OpenApiSource

YAML = """\
openapi: 3.0.3   # keep me
info: {title: Books, version: "1"}
servers:
  - url: /v1
paths:
  /books/{id}:
    parameters:
      - name: id
        in: path
        required: true
        schema: {type: integer}
    get:
      operationId: getBook
      summary: Get.
      parameters:
        - name: fields   # which ones
          in: query
          description: fields
          schema: {type: array, items: {type: string}}
        - $ref: '#/components/parameters/Trace'
      responses: {200: {description: ok}}
    delete:
      responses: {204: {description: gone}}
  /books:
    post:
      operationId: addBook
      description: Add.
      requestBody:
        required: true
        content:
          application/json:
            schema:
              type: object
              required: [title]
              properties:
                title: {type: string, description: title}
                part: {$ref: '#/components/schemas/Node'}
      responses: {201: {description: made}}
components:
  parameters:
    Trace: {name: X-Trace, in: header, description: shared words, schema: {type: string}}
  schemas:
    Node:
      type: object
      properties:
        name: {type: string}
        next: {$ref: '#/components/schemas/Node'}
"""


class Books(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def answer(self, status, body, kind="application/json"):
        payload = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def do_GET(self):
        parts = urlsplit(self.path)
        book = parts.path.removeprefix("/v1/books/")
        match book:
            case "429" | "401" | "503":
                self.answer(int(book), {"error": book})
            case "404":
                self.answer(404, {"error": "no such book"})
            case "999":
                self.answer(200, b"\x89PNG" + bytes(100), "image/png")
            case _:
                seen = {"path": parts.path, "query": parse_qs(parts.query), "trace": self.headers["X-Trace"]}
                self.answer(200, {**seen, "auth": self.headers["Authorization"]})

    def do_POST(self):
        self.answer(201, {"got": json.loads(self.rfile.read(int(self.headers["Content-Length"])))})


@pytest.fixture(scope="module")
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Books) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}/v1"
        http.shutdown()
        thread.join()


def call(server, name, **arguments):
    async def main():
        source = OpenApiSource(YAML, base_url=server, headers={"Authorization": "Bearer x"})
        try:
            return await source.call(name, arguments)
        finally:
            await source.aclose()

    return asyncio.run(main())


def test_each_operation_is_a_tool():
    tools = {tool.name: tool for tool in OpenApiSource(YAML).tools}
    assert list(tools) == ["getBook", "delete_books_id", "addBook"]
    get = tools["getBook"]
    assert (get.description, get.required, get.hints.read_only) == ("Get.", ("id",), True)
    assert get.parameter_docs == {"id": "", "fields": "fields", "X-Trace": "shared words"}
    assert tools["delete_books_id"].hints.destructive is True
    assert tools["addBook"].hints.read_only is False
    assert tools["addBook"].required == ("title",)


def test_a_schema_that_refers_to_itself_ends():
    part = OpenApiSource(YAML).tools[2].parameters["part"]
    assert part["properties"]["next"] == {"description": "the same as Node above"}


def test_arguments_go_where_they_belong(server):
    result = call(server, "getBook", id=7, fields=["a b", "ü"], **{"X-Trace": "t"})
    status, body = result.content.split("\n")
    assert (result.ok, status) == (True, "200 OK")
    assert json.loads(body) == {
        "path": "/v1/books/7",
        "query": {"fields": ["a b", "ü"]},
        "trace": "t",
        "auth": "Bearer x",
    }
    posted = call(server, "addBook", title="T", part={"name": "n"})
    assert json.loads(posted.content.split("\n")[1]) == {"got": {"title": "T", "part": {"name": "n"}}}


@pytest.mark.parametrize(
    ("book", "kind"), [(404, "tool_error"), (401, "auth"), (429, "transient"), (503, "transient"), (999, None)]
)
def test_what_a_status_means(server, book, kind):
    result = call(server, "getBook", id=book)
    assert result.error_kind == kind
    if book == 999:
        assert result.content == "200 OK\n[image/png: 104 bytes]"


def test_a_closed_port_is_a_transient_error():
    assert call("http://127.0.0.1:1", "getBook", id=1).error_kind == "transient"


@pytest.mark.parametrize("value", ["..", ".", ""])
def test_a_path_argument_cannot_reach_another_address(server, value):
    result = call(server, "getBook", id=value)
    assert result.error_kind == "invalid_arguments"
    assert json.loads(call(server, "getBook", id="../../x").content.split("\n")[1])["path"] == "/v1/books/..%2F..%2Fx"


def test_a_header_argument_cannot_bring_another_header(server):
    assert call(server, "getBook", id=1, **{"X-Trace": "a\r\nAuthorization: b"}).error_kind == "invalid_arguments"


def test_yaml_keeps_comments_and_changes_only_words():
    source = OpenApiSource(YAML)
    tools = {tool.name: tool for tool in source.tools}
    get = tools["getBook"].with_docs("Gets one book.", {"fields": "Names of fields.", "X-Trace": "never written"})
    add = tools["addBook"].with_docs("Adds a book.", {"title": "Its title."})
    new = source.rewritten({"getBook": get, "addBook": add})
    assert "# keep me" in new
    assert "# which ones" in new
    again = {tool.name: tool for tool in OpenApiSource(new).tools}
    assert again["getBook"].description == "Gets one book."
    assert again["getBook"].parameter_docs == {"id": "", "fields": "Names of fields.", "X-Trace": "shared words"}
    assert again["addBook"].parameter_docs["title"] == "Its title."
    assert "summary: Get." in new


def test_json_stays_byte_identical_but_for_the_words():
    text = json.dumps(
        {"openapi": "3.1.0", "paths": {"/a": {"get": {"operationId": "a", "description": "old", "responses": {}}}}},
        indent=3,
    )
    source = OpenApiSource(text)
    assert source.rewritten({}) == text
    new = source.tools[0].with_docs("new")
    assert source.rewritten({"a": new}) == text.replace('"old"', '"new"')


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"swagger": "2.0"}', "Swagger 2.0: convert"),
        ("a: 1", "not OpenAPI 3"),
        ("- 1", "must be an object"),
        ('{"openapi": "3.0.0", "paths": {"/a": {"$ref": "other.yaml#/x"}}}', "leads out of the document"),
        ('{"openapi": "3.0.0", "paths": {"/a": {"$ref": "#/x"}}}', "leads nowhere"),
        ('{"openapi": "3.0.0", "x": {"$ref": "#/x"}, "paths": {"/a": {"$ref": "#/x"}}}', "back to itself"),
    ],
)
def test_what_cannot_be_read_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        OpenApiSource(text)


def refined_words(source, description, **parameters):
    return {tool.name: tool.with_docs(description, parameters) for tool in source.tools if tool.name == "getBook"}


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_only_the_words_of_a_yaml_file_change_all_other_bytes_stay(end):
    text = YAML.replace("\n", end)
    source = OpenApiSource(text)
    new = source.rewritten(
        refined_words(source, 'Gets "one": book \U0001f4d6.', fields="Names, comma\nseparated", id="number")
    )
    changed = text.replace(
        "operationId: getBook", f'operationId: getBook{end}      description: "Gets \\"one\\": book \U0001f4d6."'
    )
    changed = changed.replace("description: fields", 'description: "Names, comma\\nseparated"')
    changed = changed.replace("      - name: id", f'      - name: id{end}        description: "number"')
    assert new == changed
    assert OpenApiSource(new).tools[0].parameter_docs["id"] == "number"


@pytest.mark.parametrize(
    ("old", "kept"),
    [
        ("      description: |\n        Many\n        lines.\n      operationId: getBook", "      operationId: getBook"),
        ("      description: >-\n        Many\n        lines.\n      # a comment\n      operationId: getBook", "# a comment"),
        ("      description: many\n        lines\n      operationId: getBook", "      operationId: getBook"),
        ("      description: 'it''s'  # a comment\n      operationId: getBook", "# a comment"),
        ("      description: &words words\n      x-other: *words\n      operationId: getBook", "operationId: getBook"),
        ("      <<: {description: merged}\n      operationId: getBook", "operationId: getBook"),
    ],
)  # fmt: skip
def test_descriptions_of_every_yaml_style_are_replaced(old, kept):
    text = YAML.replace("      operationId: getBook", old)
    source = OpenApiSource(text)
    new = source.rewritten(refined_words(source, "Gets."))
    again = OpenApiSource(new)
    assert again.tools[0].description == "Gets."
    assert kept in new
    assert "# keep me" in new
    assert "# which ones" in new
    expected = OpenApiSource(text).document
    expected["paths"]["/books/{id}"]["get"]["description"] = "Gets."
    expected["paths"]["/books/{id}"]["get"].pop("x-other", None)
    again.document["paths"]["/books/{id}"]["get"].pop("x-other", None)
    assert again.document == expected


def test_a_flow_mapping_gets_its_words_inside():
    source = OpenApiSource(YAML)
    add = next(tool for tool in source.tools if tool.name == "addBook")
    new = source.rewritten({"addBook": add.with_docs("Adds.", {"title": "Its title."})})
    assert 'title: {type: string, description: "Its title."}' in new


def test_headers_are_sent_and_reach_no_model_and_no_model_sets_them(server):
    canary = 'ä"canary\\\\9'

    async def main():
        headers = {"Authorization": f"Bearer {canary}", "X-Trace": "ours", "Accept": "application/json"}
        source = OpenApiSource(YAML, base_url=server, headers=headers)
        guard = Guard(source.tools, source, Policy())
        try:
            plain = await source.call("getBook", {"id": 1})
            return source.secrets, plain, await guard.call("getBook", {"id": 1, "X-Trace": "theirs"})
        finally:
            await source.aclose()

    secrets, plain, seen = asyncio.run(main())
    assert secrets == [f"Bearer {canary}", "ours", canary]
    assert json.loads(plain.content.split("\n", 1)[1])["auth"].encode("latin-1").decode() == f"Bearer {canary}"
    assert "canary" not in seen.content
    assert "theirs" not in seen.content


@pytest.mark.parametrize("value", ["..", ".", ""])
def test_no_argument_leads_to_another_path(server, value):
    text = YAML.replace("schema: {type: integer}", "schema: {type: string}")

    async def main(text, name, arguments):
        source = OpenApiSource(text, base_url=server)
        try:
            return await source.call(name, arguments)
        finally:
            await source.aclose()

    assert asyncio.run(main(text, "getBook", {"id": value})).error_kind == "invalid_arguments"
    split = text.replace("/books/{id}:", "/books/{id}{fields}/x:").replace("in: query", "in: path")
    assert asyncio.run(main(split, "getBook", {"id": ".", "fields": "."})).error_kind == "invalid_arguments"
    # A path that looks like an address stays on the server that was named.
    away = YAML.replace("  /books/{id}:", "  /http://127.0.0.1:1/{id}:")
    found = asyncio.run(main(away, "getBook", {"id": 7}))
    assert json.loads(found.content.split("\n", 1)[1])["path"] == "/v1/http://127.0.0.1:1/7"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("openapi: 3.0.0\npaths: [1]\n", "paths must be an object"),
        ("openapi: 3.0.0\nservers: http://x\npaths: {}\n", "servers must be a list"),
        (
            "openapi: 3.0.0\npaths: {/a: {get: {parameters: [{in: query}]}}}\n",
            "GET /a is not as OpenAPI has it: KeyError",
        ),
        ("openapi: 3.0.0\n\tpaths: {}\n", "the document is no YAML"),
        ('{"openapi": "3.0.0"', "the document is no JSON"),
        ('openapi: 3.0.0\npaths: !!python/object/apply:os.system ["exit"]\n', "paths must be an object"),
        ("openapi: 3.0.0\npaths: {/a: {$ref: '#/paths/~1a'}}\n", "leads back to itself"),
    ],
)
def test_what_is_no_openapi_document_is_refused_in_one_line(text, said):
    with pytest.raises(ValueError, match=said):
        OpenApiSource(text)


def test_schemas_that_grow_without_bounds_and_cycles_of_aliases_are_cut_short():
    schemas = {
        f"S{i}": {"type": "object", "properties": {c: {"$ref": f"#/components/schemas/S{i + 1}"} for c in "ab"}}
        for i in range(40)
    }
    parameter = {"name": "x", "in": "query", "schema": {"$ref": "#/components/schemas/S0"}}
    document = {
        "openapi": "3.1.0",
        "paths": {"/a": {"get": {"operationId": "a", "parameters": [parameter]}, "put": None}, "/b": None},
        "components": {"schemas": {**schemas, "S40": {"type": "string"}}},
    }
    tool = OpenApiSource(json.dumps(document)).tools[0]
    assert len(json.dumps(tool.input_schema)) < 1_000_000
    assert OpenApiSource("openapi: 3.0.0\nx: &a [1, *a]\npaths: {/a: {get: {operationId: q}}}\n").tools[0].name == "q"
