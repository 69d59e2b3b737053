"""From log-probabilities and rewards to a loss: advantages, ratios, masks, the language-model head."""
