"""Questions of our own in the benchmarks' original files, of which a small model gets some right and some wrong.

Their contents are what readers of files and prompts stumble over: commas, quotes, line ends, empty lines, blanks at
both ends, braces, formulas, Chinese, long options, several right ones. `data.py` has questions for checking commands.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

LETTERS = "ABCD"
Question = tuple[str, tuple[str, str, str, str], str]
"""The question, its options, the letter of the right one."""

_LONG = (
    "a long answer that goes on and on, with commas, a semicolon; and a (bracket), so that it fills more than one line "
    "of any terminal, although it says no more than that the sky is blue, the grass is green, and the night is dark"
)
_ENGLISH: tuple[Question, ...] = (
    ("What is the capital of France?", ("Berlin", "Paris", "Madrid", "Rome"), "B"),
    (' Which of these is an "even" number, as one says?\n', ("7", "9", "12", "15"), "C"),
    ("Complete: water, when it is\n\nboiled,\nbecomes", ("steam", "ice, of course", "sand", "gold"), "A"),
    ("Which sentence is the longest?", ("Short.", 'It is "short" too', " Not this, either", _LONG), "D"),
    ("For f(x) = {{x}^2} and $x=3$, f(x) is", ("$6$", "{{9}}", "\\frac{1}{9}", "3,000"), "B"),
    ("Which word means café?", ("coffee house", "señor", "naïve", "Zürich"), "A"),
    ("How many legs does a spider have?", ("4", "6", "8", "10"), "C"),
    ("Answer: which letter comes first in the alphabet?", ("D", "C", "B", "A"), "D"),
)
_ENGLISH_EXAMPLES: tuple[Question, ...] = (
    ("What color is the sky on a clear day?", ("Red", "Blue", "Green", "Black"), "B"),
    ("How many days does a week have?", ("5", "6", "7", "8"), "C"),
    ('Who says "meow"?', ("A cat", "A dog, mostly", "A cow", "A duck"), "A"),
    ("What is 2 + 2?\n", ("1", "2", "3", "4"), "D"),
    ("Which one is a fruit?", ("Stone", "Apple", "Chair", "Cloud"), "B"),
)
_CHINESE: tuple[Question, ...] = (
    ("中国的首都是____。", ("上海", "北京", "广州", "深圳"), "B"),
    (" 下列哪一个是偶数，请选择：\n", ("7", "9", "12", "15"), "C"),
    ("水在100℃，\n\n标准大气压下会变成", ("水蒸气", "冰", "“沙子”", "金"), "A"),
    ("关于细胞膜，下列说法正确的是", ("没有", "它是静止的", "不含蛋白质", "细胞膜由脂质和蛋白质组成，" * 4), "D"),
    ('"一年有几个月"的答案, 是', ("10", "12", "7", "30"), "B"),
    ("若$x^{2}=9$，且$x>0$，则$x$等于", ("$3$", "$-3$", "{9}", "\\frac{1}{3}"), "A"),
    ("蜘蛛有几条腿？", ("4条", "6条", "8条", "10条"), "C"),
    ("答案：英文字母表的第一个字母是", ("D", "C", "B", "A"), "D"),
)
_CHINESE_EXAMPLES: tuple[Question, ...] = (
    ("晴朗的天空是什么颜色？", ("红色", "蓝色", "绿色", "黑色"), "B"),
    ("一个星期有几天？", ("5", "6", "7", "8"), "C"),
    ("谁会“喵喵”叫？", ("猫", "狗，大概", "牛", "鸭"), "A"),
    ("2加2等于", ("1", "2", "3", "4"), "D"),
    ("下列哪个是水果？", ("石头", "苹果", "椅子", "云"), "B"),
)


def _jsonl(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def _csv(path: Path, rows: Iterable[Sequence[object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows(rows)


def _halves(questions: Sequence[Question], subjects: tuple[str, str]) -> Iterable[tuple[str, Sequence[Question]]]:
    middle = len(questions) // 2
    return zip(subjects, (questions[:middle], questions[middle:]), strict=True)


def write_mmlu(folder: Path) -> None:
    """`test/<subject>_test.csv` and `dev/<subject>_dev.csv` of two subjects, without a header."""
    for subject, questions in _halves(_ENGLISH, ("astronomy", "high_school_biology")):
        for split, rows in (("test", questions), ("dev", _ENGLISH_EXAMPLES)):
            _csv(
                folder / split / f"{subject}_{split}.csv",
                ([text, *options, letter] for text, options, letter in rows),
            )


def _numbered(rows: Sequence[Question]) -> Iterable[list[object]]:
    return ([number, text, *options, letter] for number, (text, options, letter) in enumerate(rows))


def write_ceval(folder: Path) -> None:
    """`val/<subject>_val.csv` and `dev/<subject>_dev.csv` of two subjects; the examples have an explanation."""
    header = ["id", "question", *LETTERS, "answer"]
    for subject, questions in _halves(_CHINESE, ("high_school_biology", "logic")):
        _csv(folder / "val" / f"{subject}_val.csv", [header, *_numbered(questions)])
        explained = ([*row, "1. 因为如此，\n2. 所以如此。"] for row in _numbered(_CHINESE_EXAMPLES))
        _csv(folder / "dev" / f"{subject}_dev.csv", [[*header, "explanation"], *explained])


def write_cmmlu(folder: Path) -> None:
    """`test/<subject>.csv` and `dev/<subject>.csv` of two subjects; the column of numbers has no name."""
    header = ["", "Question", *LETTERS, "Answer"]
    for subject, questions in _halves(_CHINESE, ("high_school_biology", "logical")):
        for split, rows in (("test", questions), ("dev", _CHINESE_EXAMPLES)):
            _csv(folder / split / f"{subject}.csv", [header, *_numbered(rows)])


def write_hellaswag(folder: Path) -> None:
    """`hellaswag_val.jsonl`, with the marks that articles leave in the texts."""
    rows = (
        (
            "Baking bread",
            "[header] How to bake bread [title] Mix the dough. [step] Put flour and water into a bowl",
            "",
            [
                "and mix them until the dough is smooth.",
                "[step] and throw it  away [substeps] at once.",
                "sings.",
                "Ω",
            ],
            0,
        ),
        (
            "Playing the piano",
            "A woman sits down at a piano.",
            "she",
            ["eats the keys.", "begins to play a song for the audience.", "is a “piano”, too.", "flies."],
            1,
        ),
        (
            "Washing a car",
            "A man walks up to a car, with a bucket and a sponge.",
            "the man",
            ["drinks the bucket.", "is a sponge.", "washes the car with the sponge, and rinses it.", "sleeps, sleeps"],
            2,
        ),
        (
            "Health",
            "[header] How to sleep better [title] Go to bed at the same time each night. [step] ",
            "",
            [
                "Never sleep.",
                "[substeps] Buy a horse [title] and ride it.",
                "1,000 beds.",
                "Your body gets used to a rhythm.  [substeps] Wake up at the same time each morning, even on weekends.",
            ],
            3,
        ),
        ("Swimming", "Two boys stand at a pool.", "they", ["jump in.", "burn.", "read the pool", "eat [it]."], 0),
        (
            "Cutting the grass",
            'A man in a shirt that says "Hello"\nstands on the lawn.',
            "he",
            ["becomes the lawn.", "pushes a mower over the grass.", "mows\nthe sky.", "counts to {{ten}}."],
            1,
        ),
        (
            "Arts and Entertainment",
            "[header] How to draw a café [title] Begin with a square [step] Draw it  lightly.",
            "Then",
            ["stop.", "eat the pencil.", "draw a door and two windows.", "draw 中国."],
            2,
        ),
        (
            "Skiing",
            "A skier goes down a hill.",
            "the skier",
            ["melts.", "up.", "is a hill.", "falls into snow."],
            3,
        ),
    )
    _jsonl(
        folder / "hellaswag_val.jsonl",
        (
            {
                "ind": number,
                "activity_label": label,
                "ctx_a": first,
                "ctx_b": second,
                "ctx": f"{first} {second}".strip(),
                "split": "val",
                "split_type": "indomain",
                "endings": endings,
                "label": right,
                "source_id": f"own~{number}",
            }
            for number, (label, first, second, endings, right) in enumerate(rows)
        ),
    )


def write_boolq(folder: Path) -> None:
    """`dev.jsonl`."""
    rows = (
        ("The sun is a star. It gives light and heat.", "is the sun a star", True),
        ('Whales live in the sea, "but" they breathe air.\nThey are mammals.', "is a whale a fish", False),
        ("Snow is frozen water.\n\nIt falls when it is cold, as in winter.", "is snow made of water", True),
        ("Café au lait (coffee with milk) comes from France, 法国.", "does café au lait have milk in it", True),
        ("No one has ever walked on the sun; it is far too hot.", "has a person walked on the sun", False),
        ("A triangle has three sides, {{a}}, {{b}} and {{c}}.", "does a triangle have four sides", False),
        ("Bread is made of flour, water, salt -- and time. " * 12, "is bread made of flour", True),
        ("  Penguins are birds that cannot fly. ", "can penguins fly ", False),
    )
    _jsonl(
        folder / "dev.jsonl",
        (
            {"question": question, "title": "Own", "answer": answer, "passage": passage}
            for passage, question, answer in rows
        ),
    )


def _choice(question: str, options: Sequence[str], label: object, passage: str | None = None) -> Mapping[str, object]:
    marked = [f"({letter}){option}" for letter, option in zip("ABCDEFG", options, strict=False)]
    return {"passage": passage, "question": question, "options": marked, "label": label, "answer": None}


def _cloze(question: str, answer: str, passage: str | None = None) -> Mapping[str, object]:
    return {"passage": passage, "question": question, "options": None, "label": None, "answer": answer}


def write_agieval(folder: Path) -> None:
    """`<subject>.jsonl` of each kind: both languages, with and without a passage, four options or five, one right or
    several, and written answers.
    """
    story = 'Three friends, "Ann", Bob and 小李, sit in a row.\n\nAnn sits on the left; Bob is not beside her. '
    subjects: dict[str, Sequence[Mapping[str, object]]] = {
        "sat-math": (
            _choice("If $2x = 8$, what is $x$?", ("1", "2", "4", "8"), "C", passage=""),
            _choice("What is\n$\\frac{1}{2} + \\frac{1}{2}$ ?", ("$1$", "$\\frac{1}{4}$", "$2$", "{{0}}"), "A", ""),
        ),
        "lsat-ar": (
            _choice("Who sits in the middle?", ("Ann", "Bob", "小李", "nobody, as it seems"), "C", story),
            _choice("Who sits on the right?", ("Ann does, as is said", "Bob", "小李", "Ann and Bob"), "B", story),
        ),
        "aqua-rat": (
            _choice("A shop sells 3 pens for $6. What does one cost?", ("$1", "$2", "$3", "$6", "None of these"), "B"),
            _choice("10% of 50, is", ("5", "10", "15", "20", "25"), "A"),
        ),
        "gaokao-biology": (
            _choice("植物进行光合作用需要", ("阳光、水和二氧化碳", "只要沙子", "黑暗", "石头，铁"), "A"),
            _choice("下列属于动物的是 ", ("松树", "猫", "蘑菇", "细菌（大肠杆菌）"), "B"),
        ),
        "gaokao-physics": (_choice("下列属于力的单位的是", ("牛顿", "千克", "米", "$\\mathrm{kg\\,m/s}^{2}$"), "AD"),),
        "jec-qa-kd": (
            _choice(
                "下列哪些是法律？",
                ("《民法典》", "《刑法》", "“菜谱”", "《论语》"),
                ["A", "B"],
                "甲乙签约。\n",
            ),
            _choice("合同生效的条件是", ("意思表示真实", "下雨", "天晴", "刮风"), ["A"]),
        ),
        "math": (
            _cloze("What is $1+1$?", "2"),
            _cloze("Write one half as a fraction.", "$\\frac{1}{2}$"),
            _cloze("What is $3 - 10$?\n\nGive the number, with its sign.", "-7"),
            _cloze("Name the smallest prime number:", "2", passage="Primes have two divisors. "),
        ),
        "gaokao-mathcloze": (
            _cloze("已知 $x+1=3$, 则 $x=(\\quad)$", "2"),
            # lm-eval reads nothing in this answer.
            _cloze("判断真假：所有偶数都能被 $2$ 整除。", "真"),
            _cloze("$10-3=$", "$7$"),
            _cloze("方程 $x^2=4$ 的解集为 $(\\quad)$", "$\\{2,-2\\}$"),
        ),
    }
    for subject, rows in subjects.items():
        _jsonl(folder / f"{subject}.jsonl", rows)


def write_human_eval(folder: Path) -> None:
    """`HumanEval.jsonl`, with imports, helpers, quotes and empty lines in the problems.

    A small model that talks ends most functions at once. Of most problems here the prompt has finished functions above
    its own and the first word of its body, so that an expression is what is left.
    """
    above = (
        'def triple(x):\n    """Return three times x."""\n    return 3 * x\n\n\n'
        'def negative(x: float) -> float:\n    """Return x with the other sign."""\n    return -x\n\n\n'
    )
    problems = (
        (
            "add",
            "(a: int, b: int) -> int",
            "Add two numbers.\n    >>> add(2, 3)\n    5",
            "a + b",
            "(2, 3) == 5",
        ),
        ("double", "(x)", "Return two times x.", "2 * x", "(21) == 42"),
        (
            "is_even",
            "(n: int) -> bool",
            "Return True if n is even, else False.\n\n    >>> is_even(4)\n    True",
            "n % 2 == 0",
            "(7) is False",
        ),
        ("greet", "(name: str) -> str", "Return 'Hello, <name>!'.", "f'Hello, {name}!'", "('李') == 'Hello, 李!'"),
        (
            "largest",
            "(numbers: list) -> int",
            "Return the largest of the numbers.",
            "max(numbers)",
            "([3, 9, -1]) == 9",
        ),
        (
            "vowels",
            "(text: str) -> int",
            'Count the "vowels" (a, e, i, o, u) of a text, in either case.',
            "sum(letter in 'aeiou' for letter in text.lower())",
            "('Education, 教育') == 5",
        ),
    )
    rows = [
        {
            "task_id": f"Own/{number}",
            "prompt": f'{above}def {name}{given}:\n    """{about}"""\n    return',
            "entry_point": name,
            "canonical_solution": f" {result}\n",
            "test": f"\n\nMETADATA = {{'author': 'own'}}\n\n\ndef check(candidate):\n    assert candidate{case}\n",
        }
        for number, (name, given, about, result, case) in enumerate(problems)
    ]
    rows.append(
        {
            "task_id": "Own/6",
            "prompt": (
                "import math\nfrom typing import List\n\n\ndef square(x: float) -> float:\n    return x * x\n\n\n"
                'def length(vector: List[float]) -> float:\n    """ The length of a vector, by way of square().\n'
                '    >>> length([3.0, 4.0])\n    5.0\n    """\n'
            ),
            "entry_point": "length",
            "canonical_solution": "    return math.sqrt(sum(square(x) for x in vector))\n",
            "test": "def check(candidate):\n    assert abs(candidate([3.0, 4.0]) - 5.0) < 1e-6\n",
        }
    )
    rows.append(
        {
            "task_id": "Own/7",
            "prompt": "\n\ndef last(items: list):\n    '''Give the last item,\n\n    or None where there is none.'''\n",
            "entry_point": "last",
            "canonical_solution": "    return items[-1] if items else None\n",
            "test": "def check(candidate):\n    assert candidate([1, 2]) == 2\n    assert candidate([]) is None\n",
        }
    )
    _jsonl(folder / "HumanEval.jsonl", rows)


WRITERS: Mapping[str, Callable[[Path], None]] = {
    "mmlu": write_mmlu,
    "ceval": write_ceval,
    "cmmlu": write_cmmlu,
    "hellaswag": write_hellaswag,
    "boolq": write_boolq,
    "agieval": write_agieval,
    "human_eval": write_human_eval,
}
"""Benchmark -> what writes its files into a folder."""
