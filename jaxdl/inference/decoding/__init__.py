"""Decoding, one token at a time: sampling, beam search."""

from jaxdl.inference.decoding.beam import beam_search as beam_search
from jaxdl.inference.decoding.row_sampling import draw_rows as draw_rows
from jaxdl.inference.decoding.sampling import sample as sample
from jaxdl.inference.decoding.speculation import speculate as speculate
from jaxdl.inference.decoding.text_beams import search_texts as search_texts
