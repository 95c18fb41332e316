"""The notebooks' moving pictures: collectives on their way, as a replay saw the kernel do them."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Rectangle

from lesson import Copy, copies
from pallas_collectives.replay import Report
from pictures import COLOURS, EMPTY, WAITING, boxes, cells


def film(draw: Callable[[Any, float], None], times: Sequence[float], size: Any = (5.6, 3.8)) -> Any:
    """A moving picture: draw(axes, time) for each time. Shown first, and where nothing moves: the
    last.
    """
    from IPython.display import Image
    from PIL import Image as Pictures

    frames = []
    figure, axes = plt.subplots(figsize=size, dpi=80)
    for now in times:
        axes.clear()
        axes.set_aspect("equal")
        axes.axis("off")
        draw(axes, now)
        figure.subplots_adjust(0, 0, 1, 0.92)
        figure.canvas.draw()
        frame = Pictures.fromarray(np.asarray(figure.canvas.buffer_rgba())).convert("RGB")
        frames.append(frame.quantize(32))
    plt.close(figure)
    file = io.BytesIO()
    frames[-1].save(
        file,
        format="PNG",
        save_all=True,
        append_images=frames,
        default_image=True,
        duration=[150] * (len(frames) - 1) + [1500],
        loop=0,
    )
    return Image(file.getvalue(), format="png")


def _places(n: int) -> np.ndarray:
    """n points on a circle, clockwise from the top."""
    angle = 2 * np.pi * np.arange(n) / n
    return np.stack([1.25 * np.sin(angle), np.cos(angle)], axis=1)


def _moments(moving: list[Copy], frames: int) -> np.ndarray:
    return np.linspace(moving[0].begins, max(copy.arrives for copy in moving), frames)


def _between(copy: Copy, now: float, places: np.ndarray) -> np.ndarray:
    share = (now - copy.begins) / (copy.arrives - copy.begins)
    return places[copy.source] + share * (places[copy.target] - places[copy.source])


def _ring(axes: Any, places: np.ndarray) -> None:
    closed = np.concatenate([places, places[:1]])
    axes.plot(*closed.T, color=WAITING, lw=1, zorder=0)
    axes.set(xlim=(-2.0, 2.0), ylim=(-1.2, 1.3))


def gather_film(report: Report, rows: int, title: str, frames: int = 24) -> Any:
    """An all-gather on its way: each device's row of blocks fills as they come.

    `rows` is how many rows of the result a block has; blocks may come in halves of these.
    """
    moving, n = copies(report), len(report.engine.cores)
    places = _places(n)
    cell = 1.1 / n

    def draw(axes: Any, now: float) -> None:
        _ring(axes, places)
        for device, (x, y) in enumerate(places):
            left, bottom = x - n * cell / 2, y - cell / 2
            cells(axes, left, bottom, [EMPTY] * n, cell)
            cells(axes, left + device * cell, bottom, [COLOURS[device]], cell)
            axes.text(x, y + cell * 0.8, f"device {device}", ha="center", va="bottom", fontsize=9)
        there: list[Any] = []
        on_the_way: list[Any] = []
        for copy in moving:
            (row, height), *_ = copy.writes
            block, above = divmod(row, rows)
            high = cell * height / rows
            if copy.arrives <= now:  # parts of a block grow together
                x, y = places[copy.target] + (cell * (block + 0.03 - n / 2), -cell / 2)
                y += cell * above / rows
                there.append(((x, y, 0.94 * cell, high), COLOURS[block]))
            elif copy.begins <= now:
                x, y = _between(copy, now, places) - cell / 2
                on_the_way.append(((x, y, cell, high), COLOURS[block]))
        for pieces, edges in ((there, "none"), (on_the_way, "white")):
            if pieces:
                boxes(axes, *zip(*pieces, strict=True), edgecolors=edges, lw=1, zorder=3)
        axes.set_title(f"{title}   {(now - moving[0].begins) * 1e6:5.1f} µs (modelled)")

    return film(draw, _moments(moving, frames))


def terms_of(copy: Copy, step: int, n: int) -> list[int]:
    """The devices whose terms are in the sum that is sent to the right at a step."""
    return [(copy.source - k) % n for k in range(step + 1)]


def scatter_film(report: Report, title: str, frames: int = 24) -> Any:
    """A reduce-scatter on its way, one way round in one part: the sums take up terms as they go.

    A sum has a place for everyone's term; its frame has the colour of the device that will own it.
    """
    n = len(report.engine.cores)
    moving = []
    for device in range(n):
        sent = [copy for copy in copies(report) if copy.source == device]
        for step, copy in enumerate(sent):
            owner = (device + n - 1 - step) % n
            moving.append((copy, owner, terms_of(copy, step, n)))
    places, cell = _places(n), 0.13

    def sum_at(axes: Any, x: float, y: float, owner: int, terms: Sequence[int]) -> None:
        colours = [COLOURS[d] if d in terms else "white" for d in range(n)]
        x, y = x - n * cell / 2, y - cell / 2
        cells(axes, x, y, colours, cell)
        frame = {"fill": False, "edgecolor": COLOURS[owner], "lw": 2.5}
        axes.add_patch(Rectangle((x, y), n * cell, cell, **frame))

    def draw(axes: Any, now: float) -> None:
        _ring(axes, places)
        for device, (x, y) in enumerate(places):
            arrived = [c for c, owner, _ in moving if owner == device == c.target]
            done = all(c.arrives <= now for c in arrived)
            sum_at(axes, x, y, device, range(n) if done else [device])
            axes.text(x, y + 0.12, f"device {device}", ha="center", va="bottom", fontsize=9)
        for copy, owner, terms in moving:
            if copy.begins <= now < copy.arrives:
                sum_at(axes, *_between(copy, now, places), owner, terms)
        axes.set_title(f"{title}   {(now - moving[0][0].begins) * 1e6:5.1f} µs (modelled)")

    return film(draw, _moments([copy for copy, _, _ in moving], frames))


def torus_film(report: Report, sizes: tuple[int, int], rows: int, frames: int = 28) -> Any:
    """An all-gather over both axes of a torus at once: each chip's grid of blocks fills.

    Blocks have `rows` rows and come in parts of these. What goes round an axis by its wrap leaves
    the picture on one side and comes in on the other.
    """
    moving = copies(report)
    n_rows, n_columns = sizes
    cell, width = 0.27, 0.25
    at = {d: np.array([d % n_columns, -(d // n_columns)], float) * 1.15 for d in range(9)}

    def blocks(corner: Any, spans: Any) -> tuple[list[Any], list[str]]:
        """Boxes and their colours: the parts of blocks in a grid whose upper left is the corner."""
        (x0, nx), (y0, ny), (start, size), *_ = spans
        here = [(x0 + x, y0 + y) for x, y in np.ndindex(nx, ny)]
        height = cell * size / rows
        return [
            (corner[0] + cell * y, corner[1] - cell * (x + start / rows) - height, width, height)
            for x, y in here
        ], [COLOURS[x * n_columns + y] for x, y in here]

    def draw(axes: Any, now: float) -> None:
        axes.set(xlim=(-0.95, 1.15 * n_columns - 0.2), ylim=(-1.15 * n_rows + 0.2, 0.95))
        grid_corner = np.array([-cell * n_columns / 2, cell * n_rows / 2])
        empty, there, moving_now = [], [], []
        for device, middle in at.items():
            everywhere, _ = blocks(middle + grid_corner, ((0, n_rows), (0, n_columns), (0, rows)))
            empty.append((everywhere, [EMPTY] * len(everywhere)))
            row, column = divmod(device, n_columns)
            top = middle[1] + cell * n_rows / 2 + 0.03
            name = f"device {device}"
            axes.text(middle[0], top, name, ha="center", va="bottom", fontsize=7)
            own = (row, 1), (column, 1), (0, rows)
            there.append(blocks(middle + grid_corner, own))
        for copy in moving:
            target = at[copy.target] + grid_corner
            if copy.arrives <= now:
                there.append(blocks(target, copy.writes))
            elif copy.begins <= now:
                step = at[copy.target] - at[copy.source]
                step = np.where(abs(step) > 1.2, -np.sign(step) * 1.15, step)
                share = (now - copy.begins) / (copy.arrives - copy.begins)
                begins_at = at[copy.source] + grid_corner + share * step
                ends_at = target - (1 - share) * step
                for corner in {tuple(np.round(begins_at, 6)), tuple(np.round(ends_at, 6))}:
                    moving_now.append(blocks(np.array(corner), copy.writes))
        for layer in filter(None, (empty, there, moving_now)):
            places, colours = (list(itertools.chain(*each)) for each in zip(*layer, strict=True))
            boxes(axes, places, colours, edgecolors="none")
        axes.set_title(f"both axes at once   {(now - moving[0].begins) * 1e6:5.1f} µs (modelled)")

    return film(draw, _moments(moving, frames), (4.4, 4.6))
