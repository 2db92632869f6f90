"""Do the checks of the other tests here notice what they are for?"""

import pytest

GOOD = """<!doctype html><html lang=en><title>good</title>
<meta name=viewport content="width=device-width"><main><h1>Good</h1><p>Text.</p></main>"""


def written(folder, name, text):
    (folder / name).write_text(text)
    return folder / name


def test_a_good_page_passes_every_check(visit, look, tmp_path):
    seen = visit(written(tmp_path, "good.html", GOOD), **look)
    seen.check_accessible()
    seen.check_fits()
    seen.check()


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("<img src='https://example.com/a.png' alt=''>", "left the machine.*example.com"),
        ("<link rel=stylesheet href='other.css'>", "left the machine.*other.css"),
        ("<script>fetch('http://192.0.2.1/').catch(() => 0)</script>", "left the machine"),
        ("<script>console.error('oh')</script>", "console has errors.*oh"),
        ("<script>throw new Error('thrown')</script>", "console has errors.*thrown"),
    ],
)
def test_faults_are_noticed(visit, tmp_path, part, said):
    seen = visit(written(tmp_path, "bad.html", GOOD + part))
    seen.page.wait_for_timeout(50)
    with pytest.raises(AssertionError, match=said):
        seen.check()
    seen.left.clear()
    seen.errors.clear()


def test_axe_and_width_notice_faults(visit, tmp_path):
    part = "<button></button><div style='width:3000px'>wide</div>"
    seen = visit(written(tmp_path, "bad.html", GOOD + part))
    with pytest.raises(AssertionError, match="button-name"):
        seen.check_accessible()
    with pytest.raises(AssertionError, match="wider than the window"):
        seen.check_fits()
