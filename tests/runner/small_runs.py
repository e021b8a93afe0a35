"""A run of two steps, as small as possible, for each recipe that predicts from files."""

SMALL = ["debug=tiny", "evaluate.pictures=false", "max_steps=2", "reproducibility.threads=1", "evaluate.every_epochs=null", "dataset.samples=16"]
EXPERIMENTS = {
    "classification": ["experiment=resnet18_digits", "model.width=8", "callbacks=[ema]", "callbacks.ema.every_steps=1"],
    "detection": ["experiment=retinanet_bccd", "batch_size=4", "dataset.valid_samples=4", "model.channels=32", "model.score_thresh=0", "callbacks=[ema]"],
    "instance_segmentation": ["experiment=maskrcnn_digit_masks", "batch_size=2", "dataset.valid_samples=2", "+model.box_score_thresh=0.0"],
    "segmentation": ["experiment=fcn_digit_masks", "dataset.valid_samples=4"],
    "speech_recognition": ["experiment=wav2letter_spoken_digits", "model.width=16", "model.top_width=32", "callbacks=none"],
    "audio_classification": ["experiment=audio_classification_spoken_digits", "model.width=4"],
    "autoencoder": ["experiment=autoencoder_digits", "model.widths=[4]", "model.variational=true"],
    "regression": ["experiment=linear_diabetes", "model.widths=[8]", "recipe.loss.delta=0.5", "loss=huber"],
    "text_classification": ["experiment=transformer_unicode_categories"],
    "language_modelling": ["experiment=gpt_unicode_names"],
    "separation": ["recipe=separation", "model=conv_tasnet_small", "transforms=none", "optimizer=adam", "callbacks=none", "dataset.valid_samples=4"],
    "vocoder": [
        "recipe=vocoder",
        "model=wavernn_small",
        "transforms=mel_vocoder",
        "optimizer=adam",
        "callbacks=none",
        "dataset.clips=16",
        "dataset.valid_clips=4",
    ],
}


def overrides_of(recipe: str) -> list[str]:
    """The arguments for `samewise train`; for the vocoder's data `samples` is the length of a clip."""
    return [one for one in [*SMALL, *EXPERIMENTS[recipe]] if recipe != "vocoder" or one != "dataset.samples=16"]
