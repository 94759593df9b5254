"""Questions to a run as tools of the Model Context Protocol, on stdin and stdout: for agents."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

from dglkge import __version__
from dglkge.errors import InputError
from dglkge.inference.choices import ALL
from dglkge.serving.explorer import Explorer

INSTRUCTIONS = """Answers come from embeddings of the knowledge graph {dataset}:
{entities} entities, {relations} relations. Names are exact: look an entity up with search_entity, and see
list_relations. Only scores of one query can be compared; probabilities, where they are not null, are
calibrated."""


def build_server(explorer: Explorer) -> MCPServer[Any]:
    """Return a server with questions to an explorer as tools; what it refuses is the text of an error."""
    facts = explorer.describe()
    facts["entities"] = sum(facts["entities"].values())
    server = MCPServer[Any]("dglkge", version=__version__, instructions=INSTRUCTIONS.format(**facts))

    def search_entity(text: str, entity_type: str | None = None, k: int = 20) -> list[dict[str, str]]:
        """Find entities whose name begins with a text, then those that contain it elsewhere."""
        return explorer.entities(text, entity_type, k, anywhere=True)

    def list_relations() -> list[dict[str, Any]]:
        """List the relations with their entity types and numbers of known triples."""
        return explorer.relations

    def predict(
        head: str | None = None,
        relation: str | None = None,
        tail: str | None = None,
        k: int = 10,
        candidates: str = ALL,
    ) -> dict[str, Any]:
        """Complete a triple of which one part is left out: the k best heads, relations or tails.

        known_from names the split that has an answer's triple; null: the graph does not have it. candidates
        "seen" takes only entities that the graph has on that side of the relation.
        """
        query = {"head": head, "relation": relation, "tail": tail}
        return explorer.predict([query], k, None, candidates)[0]

    for tool in (search_entity, list_relations, predict, explorer.ask, explorer.explain):
        server.add_tool(_refusals()(tool), structured_output=False)
    return server


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Raise a refusal of a question as the error of a tool."""
    try:
        yield
    except InputError as error:
        raise ToolError(str(error)) from None
