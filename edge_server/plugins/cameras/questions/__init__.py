"""Questions about pictures: when a camera sees a new object, a vision-language model is asked about the picture, and
its text goes to the sinks.

A result enters `question_set` on the thread of the results, which returns at once. `new_objects` says whether the rule
of a question applies. `question_set` asks on a thread of its own; `model_request` makes the request and reads the text.
Nothing here imports the plugin of language models: any model with these inputs and this output will do.
"""
