"""First words of user turns, by domain: put into the target's mouth for a share of them, so that all domains occur."""

from __future__ import annotations

OPENINGS: dict[str, tuple[str, ...]] = {
    "code": (
        "Write a Python function that",
        "Write a Python program to",
        "Write a JavaScript function",
        "Write an SQL query",
        "How do I",
        "Explain what this code does:",
        "Fix the bug in this Python code:",
        "What is the difference between a list and",
    ),
    "mathematics": (
        "What is the sum of",
        "Solve for x:",
        "Solve the equation",
        "Calculate the",
        "Find the area of",
        "A train",
        "A store sells",
        "If a",
        "What is the probability",
        "Tom has",
    ),
    "question answering": (
        "What is the",
        "What are the",
        "Who was",
        "Who wrote",
        "Why do",
        "Why is",
        "How does",
        "When did",
        "Where is",
        "What causes",
        "Explain",
    ),
    "translation": (
        "Translate the following sentence into French:",
        "Translate the following sentence into Spanish:",
        "Translate this sentence to German:",
        "Translate to English:",
        'How do you say "',
    ),
    "summarising": (
        "Summarize the following text:",
        "Summarize this paragraph in one sentence:",
        "Write a short summary of the following article:",
        "Give me the key points of this passage:",
        "Rewrite the following paragraph in simpler words:",
    ),
    "retrieval": (
        "Read the passage and answer the question.\n\nPassage:",
        "Based on the following text, answer the question.\n\nText:",
        "According to the passage below,",
        "Extract all the names from the following text:",
    ),
    "chat": (
        "Write a short story about",
        "Write a poem about",
        "Write an email to",
        "Give me three tips",
        "I feel",
        "Suggest",
        "Plan a",
        "What should I",
        "Imagine you are",
        "List five",
    ),
}
LONG_DOMAINS = ("summarising", "retrieval")
"""Domains whose user turn carries a passage and may be three times as long."""
