def mirror_path(fleet: str) -> str:
    return f"rollouts/{fleet}/mirror.json"
