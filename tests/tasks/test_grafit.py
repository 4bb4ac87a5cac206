"""The task Grafit: its memory, target network and losses, its options, the sizes of its networks."""

import pytest
import torch
from torch.nn import functional as F

import vitrail
from tests.tasks.trainings import GRAFIT, open_few_digits
from tests.trainers import make_trainer
from vitrail.data.image_loader import ImageLoader
from vitrail.data.rng import sample_key
from vitrail.errors import UserError
from vitrail.heads.embedding import EmbeddingConfig
from vitrail.heads.task_heads import read_config
from vitrail.recipes import lookup
from vitrail.recipes.task_options import GrafitOptions
from vitrail.tasks.dino import TEACHER_COST
from vitrail.tasks.grafit import GrafitModule, GrafitTargets
from vitrail.tasks.neighbor_losses import instance_loss, neighbor_loss, triplet_loss

SIZES = {"outputs": 8, "hidden": 16}


def make_module(labels=(0, 1, 0, 1, 0, 1), **options):
    torch.manual_seed(0)
    options = GrafitOptions(**SIZES | options)
    model = vitrail.create("vitrail_mini", 2 if options.class_weight else 0, 8, width=16, depth=1, patch_size=2)
    if options.projector != "none":
        model.set_task_head(EmbeddingConfig(options.projector, 8, 16))
    return GrafitModule(model, options, torch.tensor(labels), lookup("grafit_small").set({"batch_size": 4}))


def targets(index, views=None):
    index = torch.tensor(index)
    return GrafitTargets(views, index, torch.arange(len(index)))


def test_the_memory_is_the_mean_of_old_and_new_embeddings():
    for normalize in (True, False):
        module = make_module(instance_weight=0.0, normalize_memory=normalize)
        before = module.memory.clone()
        new = F.normalize(torch.randn(4, 8), dim=1)
        module.fresh.copy_(new)
        module.fresh_index.copy_(torch.tensor([4, 1, 4, 0]))  # one image twice: its first embedding counts
        module.update_memory(torch.zeros(()))
        expected = before.clone()
        for row, image in ((0, 4), (1, 1), (3, 0)):
            mean = (before[image] + new[row]) / 2
            expected[image] = F.normalize(mean, dim=0) if normalize else mean
        torch.testing.assert_close(module.memory, expected)
        assert not module.fresh.any()


def test_a_skipped_step_leaves_the_memory():
    module = make_module(instance_weight=0.0)
    before = module.memory.clone()
    module.fresh.fill_(torch.nan)
    module.update_memory(torch.ones(()))
    assert torch.equal(module.memory, before)


def test_embeddings_go_to_their_places_in_the_batch():
    """As two micro-batches write them, in any order."""
    module = make_module(instance_weight=0.0).eval()
    images = torch.randn(4, 3, 8, 8)
    for rows in ([2, 3], [0, 1]):
        module(images[rows], GrafitTargets(None, torch.tensor(rows) + 1, torch.tensor(rows)))
    embedded = module.model.task_head(module.model.features(images).pooled)
    torch.testing.assert_close(module.fresh, F.normalize(embedded, dim=1).detach())
    assert module.fresh_index.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("shared", [False, True])
def test_the_loss_is_the_weighted_sum_of_its_parts(shared):
    weights = {"neighbor_weight": 0.5, "instance_weight": 2.0, "class_weight": 0.25, "triplet_weight": 0.125}
    module = make_module(views=3, shared_view=shared, **weights).eval()
    images, views = torch.randn(4, 3, 8, 8), torch.randn(12 - 4 * shared, 3, 8, 8)
    own = targets([0, 1, 2, 5], views)
    total, neighbor, classes, instance, triplet = module(images, own)
    assert total.item() == pytest.approx(
        0.5 * neighbor.item() + 0.25 * classes.item() + 2 * instance.item() + 0.125 * triplet.item(), rel=1e-5
    )
    model = module.model
    compared = torch.cat([images, views]) if shared else views
    embedded = model.task_head(model.features(compared).pooled).unflatten(0, (3, 4))
    predictions = module.predictor(embedded.flatten(0, 1)).unflatten(0, (3, 4))
    goals = module.target.task_head(module.target.features(compared).pooled).unflatten(0, (3, 4))
    torch.testing.assert_close(instance, instance_loss(predictions, goals).detach())
    first = model.task_head(model.features(images).pooled)
    expected = neighbor_loss(first, module.memory, module.labels, own.image, 0.05).mean()
    torch.testing.assert_close(neighbor, expected.detach())


def make_training(tmp_path, **changes):
    recipe = lookup("grafit_small").set(GRAFIT | changes)
    source = open_few_digits().train
    return make_trainer(recipe, source, tmp_path), ImageLoader(source, workers=0, log=lambda message: None)


def test_a_step_updates_memory_and_target_as_in_the_paper(tmp_path):
    """The target after a step: xi <- tau xi + (1 - tau) theta. The memory: of the images of the step, no other."""
    changes = {"task_options.momentum": 0.75, "task_options.momentum_end": 0.75}
    trainer, loader = make_training(tmp_path, **changes)
    module = trainer.task.module
    online, target = (dict(each.named_parameters()) for each in (module.model, module.target))
    before = {name: value.clone() for name, value in target.items()}
    memory = module.memory.clone()
    stream = loader.train_loader(trainer.sampler, trainer.devices.own_micro_batches, trainer.devices.micro_batches)
    batches = stream.iterate_steps(0, 2)
    batch = next(batches)
    trainer.train_step(lambda: batch)
    changed = (module.memory != memory).any(1).nonzero()[:, 0].tolist()
    assert sorted(set(batch.index.tolist())) == changed
    for name, value in target.items():
        torch.testing.assert_close(value, 0.75 * before[name] + 0.25 * online[name], msg=name)
    # With constant weights, n steps: theta + tau^n (xi - theta).
    start = {name: value.clone() for name, value in target.items()}
    for _ in range(3):
        trainer.task.after_optimizer_step(trainer.position(), torch.zeros(()))
    for name, value in target.items():
        torch.testing.assert_close(value, online[name] + 0.75**3 * (start[name] - online[name]), msg=name)


def test_the_memory_starts_with_features_on_request(tmp_path):
    trainer, loader = make_training(tmp_path)
    messages = trainer.task.initialize(trainer.model, loader, 16)
    assert messages == ["the memory starts with embeddings of 40 training images"]
    module = trainer.task.module.eval()
    batch = next(loader.iterate(8))
    images = trainer.model.preprocessing.apply(batch.pixels, batch.sizes)
    embedded = F.normalize(module.model.task_head(module.model.features(images).pooled), dim=1)
    torch.testing.assert_close(module.memory[batch.index], embedded.detach())


def test_all_views_are_compared_where_no_loss_reads_labels(tmp_path):
    """No further view is computed."""
    changes = {f"task_options.{name}_weight": 0.0 for name in ("neighbor", "class")} | {"task_options.views": 3}
    trainer, loader = make_training(tmp_path, **changes)
    task, batch = trainer.task, next(loader.iterate(4))
    images, others = task.make_views(batch.pixels, batch.sizes, sample_key(0, 0, batch.index, batch.repeat))
    assert (len(images), len(others)) == (4, 8)
    assert task.relative_cost == 3 + 3 * TEACHER_COST
    module = task.module.eval()
    _, instance, triplet = module(images, GrafitTargets(others, batch.index, torch.arange(4)))
    embedded = module.model.task_head(module.model.features(torch.cat([images, others])).pooled)
    goals = module.target.task_head(module.target.features(torch.cat([images, others])).pooled)
    expected = instance_loss(module.predictor(embedded).unflatten(0, (3, 4)), goals.unflatten(0, (3, 4)))
    torch.testing.assert_close(instance, expected.detach())
    options = task.options
    torch.testing.assert_close(triplet, triplet_loss(embedded[:4], embedded[4:8], options.triplet_margin, 16).detach())


def test_embeddings_of_two_classes_may_lie_on_a_line(tmp_path):
    line = {"feature_std": 0.8, "effective_rank": 1.0}
    task = make_training(tmp_path)[0].task
    assert task.diagnose(line, 1.0) == ""
    assert "nearly equal" in task.diagnose(line | {"feature_std": 0.0}, 1.0)
    changes = {f"task_options.{name}_weight": 0.0 for name in ("neighbor", "class")}
    assert "nearly equal" in make_training(tmp_path, **changes)[0].task.diagnose(line, 1.0)


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def test_the_networks_have_the_sizes_of_table_2_7():
    sizes = []
    for config in (None, EmbeddingConfig("linear", 128), EmbeddingConfig("mlp", 256, 4096)):
        with torch.device("meta"):
            model = vitrail.create("resnet50", classes=0, device="meta")
            sizes.append(count(model if config is None else model.set_task_head(config)))
    assert sizes == [23_508_032, 23_770_304, 32_957_504]  # 23.5M, 23.8M, 32.9M


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"neighbor_weight": 0.0, "instance_weight": 0.0}, "at least one above 0"),
        ({"instance_weight": -1.0}, "at least one above 0"),
        ({"views": 1}, "at least 2"),
        ({"temperature": 0.0}, "above 0"),
        ({"momentum": 1.5}, "from 0 to 1"),
        ({"margin": -1.0}, "at least 0"),
        ({"clusters": 1}, "at least 2"),
        ({"neighbor_weight": 0.0, "instance_weight": 0.0, "class_weight": 1.0}, "set it to none"),
    ],
)
def test_options_out_of_range_are_explained(changes, message):
    with pytest.raises(UserError, match=message):
        GrafitOptions(**changes)


def test_projectors_in_files_are_checked():
    good = {"task": "embedding", "kind": "mlp", "outputs": 8, "hidden": 16, "blocks": []}
    assert read_config(good) == EmbeddingConfig("mlp", 8, 16)
    for change in ({"kind": "exec"}, {"outputs": 0}, {"hidden": 1 << 40}, {"outputs": "8"}, {"blocks": [1]}, {"more": 1}):
        with pytest.raises(UserError):
            read_config(good | change)


def test_trainings_that_cannot_work_are_explained(tmp_path):
    with pytest.raises(UserError, match="does not mix them"):
        vitrail.train("digits", "grafit_small", changes={"mixing.mixup": 0.1}, out=tmp_path / "a")
    with pytest.raises(UserError, match="one per class"):
        make_training(tmp_path, **{"architecture.pooling": "per_class", "task_options.class_weight": 1.0})


def test_a_transfer_may_have_an_mlp_classifier(tmp_path):
    """Linear, BatchNorm, ReLU, linear, as in Section 2.4.6."""
    mlp = {"pre_logits": 12, "pre_logits_kind": "batch_norm"}
    model = vitrail.create("vitrail_mini", 3, 16, width=16, depth=1, **mlp)
    assert [type(layer).__name__ for layer in model.pre_logits] == ["Linear", "BatchNorm1d", "ReLU"]
    images = torch.randn(4, 3, 16, 16)
    model.train()(images)
    logits = model.eval()(images)
    vitrail.save(model, tmp_path / "a.safetensors")
    again = vitrail.load(tmp_path / "a.safetensors").eval()
    assert again.architecture.pre_logits_kind == "batch_norm"
    assert torch.equal(again(images), logits)
    torch.testing.assert_close(vitrail.optimize(model)(images), logits, rtol=1e-4, atol=1e-5)
    with pytest.raises(UserError, match="pre_logits above 0"):
        vitrail.create("vitrail_mini", 3, 16, pre_logits_kind="batch_norm")
    with pytest.raises(UserError):
        vitrail.save(vitrail.create("deit_tiny_patch16", 3, 32, depth=1, **mlp), tmp_path / "a.pth", format="deit")
