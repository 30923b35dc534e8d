import com.google.gson.JsonObject
import groovy.transform.CompileStatic
import io.netty.buffer.ByteBuf
import io.netty.buffer.Unpooled
import io.netty.handler.codec.http.DefaultFullHttpResponse
import io.netty.handler.codec.http.FullHttpResponse
import io.netty.handler.codec.http.HttpHeaderNames
import io.netty.handler.codec.http.HttpHeaderValues
import io.netty.handler.codec.http.HttpResponseStatus
import io.netty.handler.codec.http.HttpUtil
import io.netty.handler.codec.http.HttpVersion
import java.nio.charset.StandardCharsets
import java.util.regex.Matcher

/** Answers that TorchServe does not give, and those that it gives (0.12) in words that say what happened. */
@CompileStatic
class Answers {
    static final String NO_ROOM = 'the requests that wait hold all the memory there is for them: try again'

    /** An answer in JSON; 503 says when to come again. */
    static FullHttpResponse of(int status, ByteBuf body) {
        FullHttpResponse answer = new DefaultFullHttpResponse(
                HttpVersion.HTTP_1_1, HttpResponseStatus.valueOf(status), body)
        answer.headers().set(HttpHeaderNames.CONTENT_TYPE, HttpHeaderValues.APPLICATION_JSON)
        return later(answer)
    }

    /** The body of an error, as TorchServe writes one. */
    static ByteBuf error(int status, String type, String message) {
        JsonObject body = new JsonObject()
        body.addProperty('code', status)
        body.addProperty('type', type)
        body.addProperty('message', message)
        return Unpooled.copiedBuffer(body.toString(), StandardCharsets.UTF_8)
    }

    /**
     * TorchServe's answer, or a better one with the same meaning.
     *
     * @param contentType of the request, as it said it
     */
    static FullHttpResponse inWords(FullHttpResponse answer, String contentType) {
        int status = answer.status().code()
        if (status == 503) {
            String text = answer.content().toString(StandardCharsets.UTF_8)
            Matcher model = text =~ /Model \\"([^"\\]+)\\"(?: Version ([^"\\]+)\\")? has no worker to serve/
            if (model.find()) {
                return refused(answer, model.group(1), model.group(2))
            }
            Matcher ours = text =~ /^\{\s*"code": 503,\s*"type": "InternalServerException",\s*"message": "([^"\\]*)"/
            if (ours.find()) {
                return instead(answer, 503, 'ServiceUnavailableException', ours.group(1))
            }
        }
        if (status == 404) {
            // Its last version is gone, and its name is about to.
            Matcher model = answer.content().toString(StandardCharsets.UTF_8) =~
                    /Model version: null does not exist for model: ([^"\\]+)"/
            if (model.find()) {
                return instead(answer, 404, 'ModelNotFoundException', removedText(model.group(1)))
            }
        }
        if (status == 500 && says(answer, 'ErrorDataDecoderException')) {
            return instead(answer, 400, 'BadRequestException', 'the body is not the form that its content type, '
                    + "'$contentType', announces: send an image with the header 'Content-Type: image/jpeg' "
                    + "(with curl, -T FILE instead of --data-binary), or multipart/form-data with a part named data")
        }
        return later(answer)
    }

    private static FullHttpResponse instead(FullHttpResponse answer, int status, String type, String message) {
        ByteBuf body = error(status, type, message)
        FullHttpResponse other = new DefaultFullHttpResponse(
                answer.protocolVersion(), HttpResponseStatus.valueOf(status), body, answer.headers(),
                answer.trailingHeaders())
        HttpUtil.setContentLength(other, body.readableBytes())
        answer.release()
        return later(other)
    }

    private static FullHttpResponse later(FullHttpResponse answer) {
        if (answer.status().code() == 503) {
            answer.headers().set(HttpHeaderNames.RETRY_AFTER, 1)
        }
        return answer
    }

    private static boolean says(FullHttpResponse answer, String words) {
        return answer.content().toString(StandardCharsets.UTF_8).contains(words)
    }

    private static String removedText(String name) {
        return "Model not found: $name has been removed"
    }

    private static FullHttpResponse refused(FullHttpResponse answer, String name, String version) {
        ModelQueue queue = Models.queueOf(name, version)
        return queue == null || queue.isClosed()
                ? instead(answer, 404, 'ModelNotFoundException', removedText(name))
                : instead(answer, 503, 'ServiceUnavailableException', queue.refusal())
    }
}
