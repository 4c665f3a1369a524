"""Decoding, one token at a time: sampling, beam search."""

from jaxdl.decoding.beam import beam_search as beam_search
