def register() -> None: pass
