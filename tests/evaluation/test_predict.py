"""From files to class names."""

import os

import pytest
import torch

import vitrail
from tests.images import make_folder, make_image, spoil
from vitrail.data.datasets.folder import FolderSource
from vitrail.data.decode import decode
from vitrail.data.loader import Problem
from vitrail.data.transforms.pipeline import augment
from vitrail.errors import UserError
from vitrail.evaluation.accuracy import test_view
from vitrail.evaluation.predict import detail, in_words, open_images, predict, read_list


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = vitrail.create("deit_tiny_patch16", 4, 16, patch_size=4, width=16, depth=1, heads=2)
    model.class_names = ["red", "green", "blue", "<b>[bold]"]
    return model


def test_files_and_folders_in_the_order_given(tmp_path):
    make_folder(tmp_path / "many", ["b", "a"], 2)
    make_image(tmp_path / "one.jpg")
    (tmp_path / "many" / "notes.txt").write_text("not an image")
    (tmp_path / "many" / ".hidden.png").write_text("")
    os.symlink(tmp_path / "many", tmp_path / "many" / "a" / "round")
    (tmp_path / "empty").mkdir()
    odd = tmp_path / "no ending"
    odd.write_bytes((tmp_path / "one.jpg").read_bytes())
    source, problems = open_images([tmp_path / "one.jpg", tmp_path / "many", odd, tmp_path / "empty", tmp_path / "gone.png"])
    found = [os.path.relpath(source.where(index), tmp_path) for index in range(len(source))]
    assert found == ["one.jpg", "many/a/000.png", "many/a/001.png", "many/b/000.png", "many/b/001.png", "no ending"]
    assert problems == [
        Problem(str(tmp_path / "empty"), "the folder holds no images"),
        Problem(str(tmp_path / "gone.png"), "there is no such file"),
    ]


def test_an_empty_path_is_told(tmp_path):
    with pytest.raises(UserError, match="The path to an image is empty: give files"):
        open_images([make_image(tmp_path / "one.jpg"), ""])


def found_in(source, folder):
    return [os.path.relpath(source.where(index), folder) for index in range(len(source))]


def test_patterns_that_no_shell_expanded(tmp_path):
    make_folder(tmp_path, ["b", "a"], 2)
    make_image(tmp_path / "a" / "deep" / "x.JPG")
    make_image(tmp_path / "odd [1].png")
    (tmp_path / "a" / "notes.txt").write_text("")
    (tmp_path / "a" / "folder.png").mkdir()
    make_folder(tmp_path / "full.png", ["c"], 1)
    source, problems = open_images([tmp_path / "**" / "*"])
    everything = ["a/000.png", "a/001.png", "a/deep/x.JPG", "b/000.png", "b/001.png", "full.png/c/000.png", "odd [1].png"]
    assert found_in(source, tmp_path) == everything
    assert problems == [Problem(str(tmp_path / "a" / "folder.png"), "a folder by the name of an image")]
    assert found_in(open_images([tmp_path / "?" / "00[01].png"])[0], tmp_path) == [*everything[:2], *everything[3:5]]
    assert found_in(open_images([tmp_path / "odd [1].png"])[0], tmp_path) == ["odd [1].png"]  # a file, not a pattern
    source, problems = open_images([tmp_path / "*.gif"])
    assert (len(source), problems) == (0, [Problem(str(tmp_path / "*.gif"), "there is no such file")])


def test_what_is_no_file_is_named_and_not_waited_for(tmp_path):
    make_image(tmp_path / "good.png")
    os.mkfifo(tmp_path / "pipe.png")
    os.symlink(tmp_path / "nowhere.png", tmp_path / "link.png")
    (tmp_path / "folder.jpg").mkdir()
    for paths in ([tmp_path], [tmp_path / "*"], [tmp_path / "**" / "*.*g"], sorted(tmp_path.iterdir())):
        source, problems = open_images(paths)
        assert found_in(source, tmp_path) == ["good.png"]
        assert {(os.path.basename(each.where), each.reason) for each in problems} in (
            {("pipe.png", "not a file"), ("link.png", "the link leads nowhere"), ("folder.jpg", reason)}
            for reason in ("a folder by the name of an image", "the folder holds no images")
        )


def test_lists_of_paths():
    assert read_list(b"a.png\nb c.png\r\n\n") == ["a.png", "b c.png"]
    assert read_list(b"a\nb.png\0c.png\0") == ["a\nb.png", "c.png"]
    assert os.fsencode(read_list(b"\xff.png\n")[0]) == b"\xff.png"
    assert read_list(b"") == []


def test_files_that_may_not_be_read(model, tmp_path, monkeypatch):
    """Even for a test that may read everything."""
    paths = [make_image(tmp_path / name) for name in ("a.png", "b.png")]
    read = FolderSource.encoded

    def encoded(self, index):
        if index == 1:
            raise PermissionError(13, "Permission denied", self.where(index))
        return read(self, index)

    monkeypatch.setattr(FolderSource, "encoded", encoded)
    answers = list(predict(model, open_images(paths)[0], workers=0))
    assert answers[1] == Problem(str(paths[1]), "Permission denied")
    assert answers[0].where == str(paths[0])
    assert in_words(Problem("x", "damaged: [Errno 3]")).reason == "damaged: [Errno 3]"


def test_the_model_prepares_images_as_it_was_tested(model, tmp_path):
    path = make_image(tmp_path / "wide.png", 1, (40, 24))
    (answer,) = predict(model, open_images([path])[0], top=3)
    pixels = torch.from_numpy(decode(path.read_bytes())).permute(2, 0, 1)[None]
    view = augment(pixels, torch.tensor([[24, 40]]), torch.zeros(1, dtype=torch.int64), test_view(model.preprocessing)).images
    chances, classes = model.eval()(view).softmax(1).topk(3)
    assert answer.where == str(path)
    assert [guess.probability for guess in answer.guesses] == pytest.approx(chances[0].tolist(), rel=1e-5)
    assert [guess.number for guess in answer.guesses] == classes[0].tolist()
    assert [guess.name for guess in answer.guesses] == [model.class_names[number] for number in classes[0]]
    assert answer.truth is None


def test_batches_and_workers_change_nothing(model, tmp_path):
    source = open_images([make_folder(tmp_path, size=(20, 30), count=4)])[0]
    one = list(predict(model, source, batch=1))
    for batch, workers in ((5, 0), (100, 0), (5, 2)):
        others = list(predict(model, source, batch=batch, workers=workers))
        assert [other.where for other in others] == [answer.where for answer in one]
        for answer, other in zip(one, others, strict=True):
            chances = {guess.name: guess.probability for guess in answer.guesses}
            assert {guess.name: guess.probability for guess in other.guesses} == pytest.approx(chances, rel=1e-4)


def test_bad_images_are_answered_with_a_reason_in_their_place(model, tmp_path):
    paths = [make_image(tmp_path / "a.png"), spoil(tmp_path / "b.png"), make_image(tmp_path / "c.png"), spoil(tmp_path / "d")]
    for batch in (1, 2, 4):
        answers = list(predict(model, open_images(paths)[0], batch=batch))
        assert [isinstance(answer, Problem) for answer in answers] == [False, True, False, True]
        assert [answer.where for answer in answers] == list(map(str, paths))


def test_some_built_in_images_whose_truth_is_known(model):
    answers = list(predict(model, open_images(["digits"])[0], top=99))
    assert len(answers) == 16
    assert all(len(answer.guesses) == 4 for answer in answers)
    assert all(answer.truth in "0123456789" for answer in answers)


def test_nothing_to_look_at_and_no_classifier(model):
    assert list(predict(model, open_images([])[0])) == []
    with pytest.raises(vitrail.UserError, match="no classifier"):
        list(predict(vitrail.create("deit_tiny_patch16", 0, 16, patch_size=4, depth=1), open_images([])[0]))


def test_images_are_decoded_as_in_the_training(model):
    assert detail(model) == 32
    model.notes["recipe"] = '{"data": {"detail": 1.5}}'
    assert detail(model) == 24
    model.notes["recipe"] = '{"data": {"detail": 0.0}}'
    assert detail(model) is None
    del model.notes["recipe"]


def test_answers_that_are_no_numbers(model, tmp_path):
    make_folder(tmp_path, ["a"], 2, (8, 8))
    source, _ = open_images([tmp_path])
    kept = model.head.bias.detach().clone()
    with torch.no_grad():
        model.head.bias[0] = torch.nan
    with pytest.raises(UserError, match="its weights are damaged"):
        list(predict(model, source, workers=0))
    with torch.no_grad():
        model.head.bias.copy_(kept)
