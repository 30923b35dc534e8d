"""What else may decode an image than the runtime's own `image_preprocessing.decode`, one file a decoder.

In come headers that were checked and encoded bytes, out go ``uint8`` images, on a GPU or the host; what one of them
does not take, the runtime decodes itself.
"""
