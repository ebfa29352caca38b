"""What every field of a model folder is to pdserve: used, refused or harmless. Tables, and what reads them."""
