"""Load test of any OpenAI-compatible server: what `pdserve bench` is made of."""
