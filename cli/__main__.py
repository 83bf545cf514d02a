def main() -> None:
    raise SystemExit("lull: not built yet")
