"""The loss of all heads against its definition, in double precision."""

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck

import vitrail
from vitrail.data.datasets.lookup import open_splits
from vitrail.models.vision_transformer import mix_tokens
from vitrail.recipes import lookup
from vitrail.recipes.schema import DistillationConfig, LossConfig, OptimizerConfig, Recipe, TokenLabelConfig, ValidationConfig
from vitrail.tasks.classification import Classification, ClassificationModule
from vitrail.tasks.targets import ClassificationTargets
from vitrail.training.optimizers import parameter_groups

SMALL = {"width": 16, "depth": 2, "heads": 2, "patch_size": 4}
CLASSES, SIZE, PATCHES = 5, (8, 12), 6
MASK = torch.tensor([[True, False, False, True, True, False]])


def network(name="deit_tiny_patch16", **parts):
    torch.manual_seed(1)
    model = vitrail.create(name, CLASSES, SIZE, **SMALL | parts).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.train()


def tower(**parts):
    """LV-ViT's: a convolutional stem with batch norm."""
    torch.manual_seed(1)
    small = {"width": 16, "depth": 2, "heads": 2, "stem_width": 4}
    return vitrail.create("lvvit_t", CLASSES, (32, 48), **small | parts).double().train()


def make_images(batch=4, size=SIZE):
    return torch.randn(batch, 3, *size, dtype=torch.float64)


def distributions(*shape):
    return torch.randn(*shape, dtype=torch.float64).softmax(-1)


def entropy(logits, targets):
    """Mean over all but the last dimension."""
    return -(targets * (logits - logits.exp().sum(-1, keepdim=True).log())).sum(-1).mean()


def soft(logits, targets, temperature):
    log_q = logits / temperature - (logits / temperature).exp().sum(-1, keepdim=True).log()
    return temperature**2 * (targets * (targets.log() - log_q)).sum(-1).mean()


def test_labels_alone():
    model, images, classes = network(), make_images(), distributions(4, CLASSES)
    torch.testing.assert_close(
        ClassificationModule(model, Recipe())(images, ClassificationTargets(classes)), entropy(model(images), classes)
    )


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("kind", ["hard", "soft"])
@pytest.mark.parametrize("token", [False, True])
def test_labels_and_a_teacher(weight, kind, token):
    """(1 - w) of the labels' and w of the teacher's loss; with a distillation token each has a head of its own."""
    model, images = network(distillation=token), make_images()
    classes, teacher = distributions(4, CLASSES), distributions(4, CLASSES)
    recipe = Recipe(distillation=DistillationConfig(kind, "someone", weight, temperature=3.0))
    outputs = model.outputs(images)
    student = outputs.distillation if token else outputs.main
    second = entropy(student, teacher) if kind == "hard" else soft(student, teacher, 3.0)
    expected = (1 - weight) * entropy(outputs.main, classes) + weight * second
    torch.testing.assert_close(ClassificationModule(model, recipe)(images, ClassificationTargets(classes, teacher)), expected)
    if weight == 0:
        torch.testing.assert_close(expected, entropy(outputs.main, classes))


def test_each_head_has_its_own_loss():
    """With a token and hard distillation the gradient of a head is that of its own term: half each."""
    model, images = network(distillation=True), make_images()
    classes, teacher = distributions(4, CLASSES), distributions(4, CLASSES)
    recipe = Recipe(distillation=DistillationConfig("hard", "someone"))
    ClassificationModule(model, recipe)(images, ClassificationTargets(classes, teacher)).backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if name.startswith("head")}
    model.zero_grad()
    outputs = model.outputs(images)
    (entropy(outputs.main, classes) / 2).backward(retain_graph=True)
    torch.testing.assert_close(found["head.weight"], model.head.weight.grad)
    assert model.head_distillation.weight.grad is None
    (entropy(outputs.distillation, teacher) / 2).backward()
    torch.testing.assert_close(found["head_distillation.weight"], model.head_distillation.weight.grad)


def test_one_head_with_hard_distillation_has_the_mean_target():
    model, images = network(), make_images()
    classes, teacher = distributions(4, CLASSES), torch.eye(CLASSES, dtype=torch.float64)[[0, 3, 2, 2]]
    both = ClassificationModule(model, Recipe(distillation=DistillationConfig("hard", "someone")))(
        images, ClassificationTargets(classes, teacher)
    )
    torch.testing.assert_close(
        both, ClassificationModule(model, Recipe())(images, ClassificationTargets((classes + teacher) / 2))
    )


def test_two_class_tokens_learn_the_same_labels():
    model, images, classes = network(distillation=True), make_images(), distributions(4, CLASSES)
    outputs = model.outputs(images)
    expected = (entropy(outputs.main, classes) + entropy(outputs.distillation, classes)) / 2
    recipe = Recipe(distillation=DistillationConfig(without_teacher="both"))
    torch.testing.assert_close(ClassificationModule(model, recipe)(images, ClassificationTargets(classes)), expected)


def test_a_distilled_model_without_a_teacher():
    """As in the released code the class head alone is trained; the other one is frozen and has no optimizer state."""
    model, images, classes = network(distillation=True), make_images(), distributions(4, CLASSES)
    module = ClassificationModule(model, lookup("deit_base_distilled").set({"distillation.kind": "none"}))
    loss = module(images, ClassificationTargets(classes))
    torch.testing.assert_close(loss, entropy(model.outputs(images).main, classes))
    loss.backward()
    without = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert without == {"head_distillation.weight", "head_distillation.bias"}
    trained = {id(p) for group in parameter_groups(model, OptimizerConfig()) for p in group["params"]}
    assert not trained & {id(parameter) for parameter in model.head_distillation.parameters()}
    assert model.prefix.grad[1].any()  # its token is read by the others
    for name in ("laptop", "small", "finetune"):
        assert lookup(name).distillation.trains_second_head


@pytest.mark.parametrize("loss", ["cross_entropy", "binary"])
@pytest.mark.parametrize("beta", [0.5, 1.0])
def test_token_labels(beta, loss):
    """The image's loss and beta times the mean of its patches'; the image's may be binary, the patches' never is."""
    model, images = network(dense_head=True), make_images()
    classes, tokens = distributions(4, CLASSES), distributions(4, PATCHES, CLASSES)
    recipe = Recipe(loss=LossConfig(loss, binary_targets="soft"), token_labels=TokenLabelConfig("somewhere", beta))
    outputs = model.outputs(images)
    first = entropy(outputs.main, classes)
    if loss == "binary":
        p = outputs.main.sigmoid()
        first = -(classes * p.log() + (1 - classes) * (1 - p).log()).mean()
    expected = first + beta * entropy(outputs.dense, tokens)
    torch.testing.assert_close(
        ClassificationModule(model, recipe)(images, ClassificationTargets(classes, None, tokens)), expected
    )


def test_everything_at_once():
    model, images = network(dense_head=True, distillation=True), make_images()
    classes, teacher, tokens = distributions(4, CLASSES), distributions(4, CLASSES), distributions(4, PATCHES, CLASSES)
    recipe = Recipe(
        distillation=DistillationConfig("soft", "someone", 0.1, 3.0),
        token_labels=TokenLabelConfig("somewhere", 0.5, mixtoken=1.0),
    )
    outputs = model.outputs(images, MASK)
    expected = 0.9 * entropy(outputs.main, classes) + 0.1 * soft(outputs.distillation, teacher, 3.0)
    expected = expected + 0.5 * entropy(mix_tokens(outputs.dense, MASK), tokens)
    torch.testing.assert_close(
        ClassificationModule(model, recipe)(images, ClassificationTargets(classes, teacher, tokens, MASK)), expected
    )


def test_mixing_predictions_back_or_mixing_labels_is_the_same_loss():
    """And the same gradients."""
    images, classes, tokens = make_images(), distributions(4, CLASSES), distributions(4, PATCHES, CLASSES)
    found = []
    for what, labels in (("predictions", tokens), ("labels", mix_tokens(tokens, MASK))):
        model = network(dense_head=True)
        recipe = Recipe(token_labels=TokenLabelConfig("somewhere", 0.5, mixtoken=1.0, mixtoken_on=what))
        loss = ClassificationModule(model, recipe)(images, ClassificationTargets(classes, None, labels, MASK))
        loss.backward()
        found.append((loss.detach(), [parameter.grad for parameter in model.parameters()]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-14)


def test_mixing_happens_between_the_stem_and_the_positions():
    """As in the released code: mix the patch embeddings, then add the class token and positions."""
    model, images = network(), make_images()
    patches, layout = model.embed(images)
    mixed = torch.stack([torch.stack([patches[3 - b if MASK[0, n] else b, n] for n in range(PATCHES)]) for b in range(4)])
    expected = model.classify(model.read(*model.encode(mixed, layout))).main
    torch.testing.assert_close(model.outputs(images, MASK).main, expected)
    assert not torch.allclose(model.outputs(images, MASK).main, model.outputs(images).main)


def test_an_image_mixed_by_patches_is_the_image_of_these_patches():
    """With a linear stem a mixed batch is a batch of images that were cut and pasted along the patches."""
    model, images = network(), make_images()
    pasted = torch.where(MASK.view(2, 3).repeat_interleave(4, 0).repeat_interleave(4, 1), images.flip(0), images)
    torch.testing.assert_close(model.outputs(images, MASK).main, model(pasted))


def test_batch_norm_of_the_stem_sees_whole_images():
    plain, mixed = tower(dense_head=True), tower(dense_head=True)
    images = make_images(4, (32, 48))
    plain.outputs(images)
    mixed.outputs(images, MASK)
    names = [name for name, _ in plain.named_buffers() if "running" in name]
    assert names
    for name in names:
        assert torch.equal(plain.get_buffer(name), mixed.get_buffer(name)), name
    # A cut and pasted image has other statistics.
    pasted = torch.where(MASK.view(2, 3).repeat_interleave(16, 0).repeat_interleave(16, 1), images.flip(0), images)
    other = tower(dense_head=True)
    other.outputs(pasted)
    assert not all(torch.allclose(plain.get_buffer(name), other.get_buffer(name)) for name in names)


def test_evaluation_does_not_mix():
    model, images = network(dense_head=True).eval(), make_images()
    assert torch.equal(model(images), model.outputs(images).logits)
    outputs = model.outputs(images)
    torch.testing.assert_close(outputs.logits, outputs.main + 0.5 * outputs.dense.max(1).values)


@pytest.mark.parametrize("kind", ["none", "hard", "soft"])
@pytest.mark.parametrize("what", ["predictions", "labels"])
def test_gradients_of_the_loss(kind, what):
    model, images = network(dense_head=True, distillation=kind != "none", depth=1), make_images(2)
    teacher = None if kind == "none" else distributions(2, CLASSES)
    targets = ClassificationTargets(distributions(2, CLASSES), teacher, distributions(2, PATCHES, CLASSES), MASK)
    distillation = DistillationConfig(kind, "" if kind == "none" else "someone", 0.4, 2.0)
    task = ClassificationModule(
        model, Recipe(distillation=distillation, token_labels=TokenLabelConfig("somewhere", 0.5, mixtoken=1.0, mixtoken_on=what))
    )
    assert gradcheck(lambda x: task(x, targets), images.requires_grad_(), fast_mode=True)


@pytest.mark.parametrize(
    ("select_by", "better"),
    [("metric", [True, False, False, False]), ("loss", [False, True, False, False]), ("latest", [True, True, False, False])],
)
def test_the_best_weights_are_selected_by_accuracy_or_loss(select_by, better):
    task = Classification(
        Recipe(validation=ValidationConfig(select_by=select_by)), open_splits("digits").train, torch.device("cpu")
    )
    best = {"top1": 0.8, "loss": 0.5, "images": 100}  # a standard error of 0.04
    accuracies, losses = (0.81, 0.77, 0.9, 0.75), (0.6, 0.4, float("nan"), 0.7)
    others = [{"top1": top1, "loss": loss} for top1, loss in zip(accuracies, losses, strict=True)]
    assert [task.is_better(values, best) for values in others] == better


def test_weights_of_the_start_are_kept_unless_accuracy_or_loss_is_better():
    validation = ValidationConfig(select_by="latest")
    task = Classification(Recipe(validation=validation), open_splits("digits").train, torch.device("cpu"))
    start = {"top1": 0.8, "loss": 0.5, "images": 100}
    accuracies, losses = (0.79, 0.8, 0.79, 0.81), (0.6, 0.6, 0.4, 0.6)
    others = [{"top1": top1, "loss": loss} for top1, loss in zip(accuracies, losses, strict=True)]
    assert [task.is_better(values, start | {"step": 0}) for values in others] == [False, False, True, True]
    assert all(task.is_better(values, start | {"step": 12}) for values in others)
