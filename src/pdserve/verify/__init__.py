"""Token-exact comparison of the disaggregated service with a plain reference: what `pdserve verify` is made of."""
