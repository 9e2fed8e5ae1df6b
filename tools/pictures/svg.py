"""Draw the READMEs' pictures: SVGs that are light or dark, like the reader's screen.

A picture that no program here draws, such as 03_zero/memory.svg, is its own source.
"""

from __future__ import annotations

from xml.sax.saxutils import escape

# names of fills; each is a CSS class, so that one picture has both themes
LIGHT = {
    "card": "#ffffff",
    "ink": "#1f2328",
    "faint": "#656d76",
    "track": "#eef1f4",
    "blue": "#7fb0f5",
    "green": "#6cc59a",
    "orange": "#f0b15e",
    "purple": "#b79cf0",
    "pink": "#ee9ac0",
    "teal": "#63c5cf",
    "grey": "#c3cad2",
}
DARK = {
    "card": "#161b22",
    "ink": "#e6edf3",
    "faint": "#9198a1",
    "track": "#262d36",
    "blue": "#2f62ad",
    "green": "#23794f",
    "orange": "#9a6416",
    "purple": "#6a4bb3",
    "pink": "#a1416f",
    "teal": "#1d7580",
    "grey": "#4b5561",
}


class Picture:
    """Shapes in the order in which they are drawn; `str()` of it is the file."""

    def __init__(self, width: int, height: int, title: str):
        self.width, self.height, self.title = width, height, title
        self.shapes: list[str] = []
        self.text(16, 24, title, size=14, weight="bold")

    def rect(self, x: float, y: float, w: float, h: float, fill: str, hint: str = "") -> None:
        shape = f'<rect class="{fill}" x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}"'
        end = f"><title>{escape(hint)}</title></rect>" if hint else "/>"
        self.shapes.append(shape + end)

    def text(
        self, x: float, y: float, text: str, size=12, fill="ink", anchor="start", weight="normal"
    ) -> None:
        style = f'font-size="{size}" text-anchor="{anchor}" font-weight="{weight}"'
        shape = f'<text class="{fill}" x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'
        self.shapes.append(shape)

    def bar(self, x: float, y: float, w: float, h: float, fill: str, label: str) -> None:
        """A filled bar with its label inside, where the label fits."""
        self.rect(x, y, max(w, 0.8), h, fill, label)
        if w >= 6.4 * len(label) + 4:
            self.text(x + w / 2, y + h / 2 + 4, label, size=11, anchor="middle")

    def legend(self, x: float, y: float, entries: dict[str, str]) -> None:
        """Colored squares with their meaning."""
        for fill, meaning in entries.items():
            self.rect(x, y - 10, 12, 12, fill)
            self.text(x + 17, y, meaning)
            x += 34 + 6.6 * len(meaning)

    def axis(self, left: float, y: float, scale: float, length: float, unit: str) -> None:
        """Ticks below a time line. length: in `unit`; scale: pixels per unit."""
        steps = (m * 10**e for e in range(-3, 9) for m in (1, 2, 5))
        tick = next(step for step in steps if length / step <= 12)
        for i in range(int(length / tick) + 1):
            x = left + i * tick * scale
            self.rect(x - 0.5, y - 2, 1, 5, "faint")
            text = f"{i * tick:g} {unit}" if i else "0"
            self.text(x, y + 15, text, size=11, fill="faint", anchor="middle")

    def __str__(self) -> str:
        place = f'viewBox="0 0 {self.width} {self.height}" width="{self.width}"'
        place += f' height="{self.height}" font-family="system-ui, sans-serif" role="img"'
        dark = f"@media (prefers-color-scheme: dark) {{ {_rules(DARK)} }}"
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {place}>',
            f"<title>{escape(self.title)}</title>",
            f"<style>{_rules(LIGHT)} {dark}</style>",
            f'<rect class="card" width="{self.width}" height="{self.height}" rx="8"/>',
        ]
        return "\n".join([*lines, *self.shapes, "</svg>", ""])


def _rules(theme: dict[str, str]) -> str:
    return "".join(f".{name}{{fill:{color}}}" for name, color in theme.items())
