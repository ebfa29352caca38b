"""One module per `pdserve` subcommand, each with `main(argv) -> exit status`. Thin: parse, call, print."""
