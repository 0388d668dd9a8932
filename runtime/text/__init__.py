"""The text side of the runtime: chat messages to token ids, and token ids back to content, reasoning and tool calls.

Nothing here knows about engines. The way in is `ChatTemplate.render` then `Tokenizer.encode_prompt`; the way out is
`ReplyParser`, which chains the incremental detokenizer, the stream parser and the tool-call formats.
"""
