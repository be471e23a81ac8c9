"""Token engines: libraries that compute tokens, behind `token_engine.TokenEngine`, and what they read of models."""
