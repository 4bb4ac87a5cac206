"""What the report of a Grafit training shows: scores at every level of labels, neighbors, and the features of one class."""

from typing import Any

import numpy as np
import torch

from vitrail.data.decode import decode
from vitrail.data.source import Labels, Source
from vitrail.evaluation.confusion import thumbnail
from vitrail.evaluation.embedding_figures import choose_family, figure_pixels, scatter_figure
from vitrail.evaluation.neighbor_sheet import TILE, Tile, neighbor_sheet
from vitrail.evaluation.probes.knn import PROTOCOLS, choose_k, knn_accuracy, nearest_neighbors
from vitrail.evaluation.probes.retrieval import CoarseLabels, coarse_probabilities, mean_average_precision, one_hot
from vitrail.tasks.neighbor_validation import Rows

QUERIES, NEIGHBORS = 6, 10
FIGURE_SIDE = 1400  # pixels


def columns_of(source: Source) -> dict[str, Labels]:
    """Label columns, coarsest first."""
    own = {source.label_name: source.label} if source.label is not None else {}
    return dict(sorted((own | source.extra).items(), key=lambda item: len(item[1].names)))


def labels_at(source: Source, name: str, rows: Rows) -> torch.Tensor:
    values = columns_of(source)[name].values[rows.images.cpu().numpy()].astype(np.int64)
    return torch.from_numpy(values).to(rows.features.device)


def score_levels(memory: Rows, train: Source, queries: Rows, validation: Source) -> list[dict[str, Any]]:
    """k-NN and mean average precision of validation images among training images, at every level with two classes or more.

    At levels finer than that of the training also the mAP conditional on the predicted, and on the true, training label.
    """
    protocol, found = PROTOCOLS["grafit"], []
    trained = train.label_name if train.label is not None and len(train.classes) > 1 else None
    for name, column in columns_of(train).items():
        if len(column.names) < 2 or name not in columns_of(validation):
            continue
        labels, query_labels = labels_at(train, name, memory), labels_at(validation, name, queries)
        known, labeled = labels >= 0, query_labels >= 0
        if trained is not None:
            known, labeled = (
                known & (labels_at(train, trained, memory) >= 0),
                labeled & (labels_at(validation, trained, queries) >= 0),
            )
        if not known.any() or not labeled.any() or not torch.isin(query_labels[labeled], labels[known]).any():
            continue
        vectors, query_vectors = memory.features[known], queries.features[labeled]
        labels, query_labels = labels[known], query_labels[labeled]
        ks = [k for k in protocol.candidates if k < len(vectors)] or [1]
        k = choose_k(vectors, labels, len(column.names), ks, protocol.temperature)
        accuracy = knn_accuracy(vectors, labels, query_vectors, query_labels, len(column.names), [k], protocol.temperature)[k]
        row = {"level": name, "classes": len(column.names), "k": k, "knn": accuracy.top1}
        row["map"] = mean_average_precision(vectors, labels, query_vectors, query_labels).mean
        if trained is not None and len(column.names) > len(train.classes):
            groups, count = labels_at(train, trained, memory)[known], len(train.classes)
            chances = coarse_probabilities(vectors, groups, query_vectors, count)
            truth = one_hot(labels_at(validation, trained, queries)[labeled], count)
            for title, probabilities in (("map_conditional", chances), ("map_oracle", truth)):
                row[title] = mean_average_precision(
                    vectors, labels, query_vectors, query_labels, CoarseLabels(groups, probabilities)
                ).mean
        found.append(row)
    return found


def draw_figures(memory: Rows, train: Source, queries: Rows, validation: Source) -> list[dict[str, str]]:
    """Validation images with their nearest training images, and the features of one class, for the report."""
    chosen = torch.linspace(0, len(queries.images) - 1, min(QUERIES, len(queries.images))).long()
    _, nearest = nearest_neighbors(memory.features, queries.features[chosen.to(queries.features.device)], NEIGHBORS)
    levels = [name for name in columns_of(train) if name in columns_of(validation)]
    rows = []
    for query, neighbors in zip(queries.images[chosen.to(queries.images.device)].tolist(), nearest.tolist(), strict=True):
        images = memory.images[torch.tensor(neighbors, device=memory.images.device)].tolist()
        rows.append((make_tile(validation, query, levels), [make_tile(train, image, levels) for image in images]))
    sheet = neighbor_sheet(rows, levels, "Validation images and the nearest training images")
    figures = [{"image": thumbnail(np.asarray(sheet), FIGURE_SIDE), "location": "neighbors of validation images"}]
    if levels and len(queries.images) > 2:
        fine, coarse = (labels_at(validation, name, queries).cpu().numpy() for name in (levels[-1], levels[0]))
        names = dict(enumerate(columns_of(validation)[levels[0]].names))
        own, family = choose_family(fine, coarse, names) if len(levels) > 1 else (np.ones(len(fine), dtype=bool), "")
        if own.sum() > 2:
            title = f"{family or 'validation images'}, by {levels[-1]}"
            mask = torch.from_numpy(own)
            figure = scatter_figure(
                queries.features.cpu()[mask], torch.from_numpy(fine)[mask], columns_of(validation)[levels[-1]].names, title
            )
            figures.append({"image": thumbnail(figure_pixels(figure), FIGURE_SIDE), "location": f"principal directions: {title}"})
    return figures


def make_tile(source: Source, image: int, levels: list[str]) -> Tile:
    labels = {
        name: columns_of(source)[name].names[value] for name in levels if (value := columns_of(source)[name].values[image]) >= 0
    }
    try:
        pixels = decode(source.encoded(image), 2 * TILE)
    except (OSError, ValueError):
        pixels = np.full((TILE, TILE, 3), 200, dtype=np.uint8)
    return Tile(pixels, labels.get(levels[-1], "") if levels else "", labels)
