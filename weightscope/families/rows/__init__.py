"""The table of architectures: what each family is, as data. A module a lineage."""

from weightscope.families.family import Family
from weightscope.families.rows.alike import ALIKE
from weightscope.families.rows.apart import APART
from weightscope.families.rows.audio import AUDIO
from weightscope.families.rows.bart import BART_LINE
from weightscope.families.rows.bert_line import BERT_LINE
from weightscope.families.rows.cohere import COHERE_DECODERS
from weightscope.families.rows.detecting import DETECTING
from weightscope.families.rows.detr import DETR_LINE
from weightscope.families.rows.encoders import ENCODERS
from weightscope.families.rows.gated import GATED
from weightscope.families.rows.gemma4 import GEMMAS
from weightscope.families.rows.gpt import GPT_DECODERS
from weightscope.families.rows.hybrid import HYBRID
from weightscope.families.rows.latent import LATENT_DECODERS
from weightscope.families.rows.listening import LISTENING
from weightscope.families.rows.llama import LLAMA_DECODERS
from weightscope.families.rows.matching import MATCHING
from weightscope.families.rows.mistral import MISTRAL_DECODERS
from weightscope.families.rows.older import OLDER_DECODERS
from weightscope.families.rows.planes import PLANES
from weightscope.families.rows.seeing import SEEING
from weightscope.families.rows.speaking import SPEAKING
from weightscope.families.rows.staged import STAGED
from weightscope.families.rows.t5 import T5_LINE
from weightscope.families.rows.text_encoders import TEXT_ENCODERS
from weightscope.families.rows.towers import TOWERS
from weightscope.families.rows.translating import TRANSLATING
from weightscope.families.rows.vision import VISION
from weightscope.families.rows.vit_line import VIT_LINE

FAMILIES: tuple[Family, ...] = (
    *GPT_DECODERS,
    *LLAMA_DECODERS,
    *COHERE_DECODERS,
    *MISTRAL_DECODERS,
    *LATENT_DECODERS,
    *ALIKE,
    *APART,
    *SEEING,
    *SPEAKING,
    *GATED,
    *GEMMAS,
    *HYBRID,
    *ENCODERS,
    *BERT_LINE,
    *TEXT_ENCODERS,
    *OLDER_DECODERS,
    *AUDIO,
    *LISTENING,
    *VISION,
    *TOWERS,
    *MATCHING,
    *VIT_LINE,
    *PLANES,
    *STAGED,
    *T5_LINE,
    *BART_LINE,
    *TRANSLATING,
    *DETR_LINE,
    *DETECTING,
)
