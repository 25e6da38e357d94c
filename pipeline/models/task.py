"""What a model is for, by the class that its configuration names."""

from collections.abc import Mapping

_BARE = "feature-extraction"
_BY_SUFFIX = {
    "ForMaskedLM": "fill-mask",
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForImageClassification": "image-classification",
    "ForImageClassificationWithTeacher": "image-classification",
    "ForObjectDetection": "object-detection",
    "ForSemanticSegmentation": "image-segmentation",
    "ForDepthEstimation": "depth-estimation",
    "ForAudioClassification": "audio-classification",
    "ForCTC": "automatic-speech-recognition",
    "ForSpeechToText": "automatic-speech-recognition",
    "UNet2DConditionModel": "image-denoising",
    "AutoencoderKL": "image-decoding",
}
# Settings of models that listen: to spectrograms, or to samples by convolutions.
_HEARS = ("num_mel_bins", "input_feat_per_channel", "feat_extract_norm")
_OF_WHAT_IS_HEARD = {
    "text2text-generation": "automatic-speech-recognition",
    "text-classification": "audio-classification",
}


def task_of(config: Mapping[str, object]) -> str:
    """The task of the class that the configuration names; the bare model's otherwise."""
    architectures = config.get("architectures", config.get("_class_name"))
    named = architectures if isinstance(architectures, list) else [architectures]
    name = str(named[0]) if named else ""
    task = next((task for suffix, task in _BY_SUFFIX.items() if name.endswith(suffix)), _BARE)
    if name.endswith("ForConditionalGeneration") and _reads_what_it_answers(config):
        task = "text2text-generation"
    return _OF_WHAT_IS_HEARD.get(task, task) if any(setting in config for setting in _HEARS) else task


def _reads_what_it_answers(config: Mapping[str, object]) -> bool:
    """Whether the condition that a class generates on is a sequence; in models of several parts it is an image."""
    said = config.get("is_encoder_decoder")
    return bool(said) if said is not None else not any(key.endswith("_config") for key in config)
