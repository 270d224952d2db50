"""Tool documentation that improves itself by using the tools (DRAFT, Qu et al., ICLR 2025)."""

from chapbook_shared.lm import Budget
from draft_docs.drafter import Counts, DraftConfig, Drafter, DraftResult, ToolDraft
from draft_docs.embedders import Embedder, HashedNgrams, SentenceEmbedder
from draft_docs.lint import Finding, lint
from draft_docs.loop import Iteration, Refined
from draft_docs.planning import Plan, ToolPlan, plan
from draft_docs.policy import Policy
from draft_docs.retrieval import bm25, ndcg, retrieval
from draft_docs.sources.base import ToolSource
from draft_docs.sources.callables import CallableSource
from draft_docs.sources.load import load_tools
from draft_docs.sources.mcp import McpServer, McpSource
from draft_docs.sources.openai_tools import OpenAIToolsSource
from draft_docs.sources.openapi import OpenApiSource
from draft_docs.stability import bleu4, is_diverse, stability
from draft_docs.stored import read_run
from draft_docs.tools import Hints, ToolResult, ToolSpec

__all__ = [
    "Drafter",
    "DraftConfig",
    "DraftResult",
    "ToolDraft",
    "Counts",
    "Iteration",
    "Refined",
    "read_run",
    "Policy",
    "Budget",
    "Plan",
    "ToolPlan",
    "plan",
    "load_tools",
    "ToolSource",
    "CallableSource",
    "OpenAIToolsSource",
    "OpenApiSource",
    "McpServer",
    "McpSource",
    "ToolSpec",
    "ToolResult",
    "Hints",
    "Embedder",
    "HashedNgrams",
    "SentenceEmbedder",
    "bleu4",
    "stability",
    "is_diverse",
    "Finding",
    "lint",
    "bm25",
    "ndcg",
    "retrieval",
]
