"""Advantages, importance ratios, policy losses and the language-model head."""
