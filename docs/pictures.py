from pathlib import Path
def draw_all(folder: Path) -> None: pass
