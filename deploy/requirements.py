"""Print the dependencies that a pyproject.toml names, one a line."""

import sys
import tomllib
from pathlib import Path

print(*tomllib.loads(Path(sys.argv[1]).read_text())["project"]["dependencies"], sep="\n")
