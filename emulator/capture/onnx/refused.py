"""Why operators of ONNX are refused that no amount of work would bring to the hardware, or that are not there yet."""

_NO_IMPORTER = "the compiler has no such operator; write it with elementwise, matrix and reduction operators"
_RANDOM = "a compiled program draws no random numbers; draw them on the host and pass them as an input"
_SEQUENCE = "sequences and optional values are no tensors; give each tensor an input or output of its own"
_TEXT = "the hardware has no strings; work on text before the model"
_TRAINING = "it belongs to training; export the model for inference"

_REASONS = {
    _RANDOM: ("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"),
    _SEQUENCE: (
        *("ConcatFromSequence", "Optional", "OptionalGetElement", "OptionalHasElement", "SequenceAt"),
        *("SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert", "SequenceLength", "SequenceMap"),
        "SplitToSequence",
    ),
    _TEXT: ("LabelEncoder", "RegexFullMatch", "StringConcat", "StringNormalizer", "StringSplit", "TfIdfVectorizer"),
    _TRAINING: ("ai.onnx.preview.training", "ai.onnx.training"),
    "files of images are decoded on the host, before the model": ("ImageDecoder",),
    "how many boxes it keeps depends on data; choose boxes on the host, after the model": ("NonMaxSuppression",),
    "trees walk from node to node by data, which no engine does; evaluate them on the host": (
        *("TreeEnsemble", "TreeEnsembleClassifier", "TreeEnsembleRegressor"),
    ),
}
_BY_NAME = {name: reason for reason, names in _REASONS.items() for name in names}


def reason_for(name: str, domain: str) -> str:
    """What to say of an operator that has no importer."""
    return _BY_NAME.get(name) or _BY_NAME.get(domain, _NO_IMPORTER)
