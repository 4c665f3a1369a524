"""Decoding, one token at a time: sampling, beam search."""

from jaxdl.inference.decoding.beam import beam_search as beam_search
